"""Published weights over TCP, for a node that does not see the store's memory.

    server:  magic, nonce
    client:  mac, length | {"open": version}             server:  length | {"size": n} | chunks of the manifest
    client:  mac, length | {"read": bucket, "offset": o}  server:  length | {"size": n} | chunks of the bucket from o
    ...                                                   chunk:   length, crc32 | bytes

One connection is one lease: the version it opened is pinned until the connection ends, at its deadline at the latest.
Each request carries HMAC-SHA256 over the server's nonce, the number of the request and its body, under the secret of
the run: the secret itself never travels, and a wrong one gets no answer. The crc finds damage on the way while it can
be asked for again (it costs a quarter of blake2b); what the bytes must be is said by the digest that the caller brings.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import socket
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from relax.types import PolicyVersion
from relax.weights.buckets import is_bucket_name
from relax.weights.manifest import MANIFEST_NAME, CorruptWeights, Manifest, VersionGone, WeightsError

MAGIC = b"RLXWTS1\0"
NONCE_BYTES = 16
MAC_BYTES = 32
MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 4096
MAX_MANIFEST_BYTES = 1 << 26
CHUNK_BYTES = 1 << 20
"""What a transfer holds in memory at once, at either end."""
IO_DEADLINE_S = 10.0
"""One frame or chunk, from its first byte to its last."""
ATTEMPTS = 4
BACKOFF_S = 0.1

REQUEST = struct.Struct(f"!{MAC_BYTES}sI")
LENGTH = struct.Struct("!I")
CHUNK = struct.Struct("!II")


class TransferFailed(WeightsError):
    """A transfer broke off, and may be tried again. `reason`: connect, closed, timeout, checksum or protocol."""

    def __init__(self, reason: str, message: str):
        self.reason = reason
        super().__init__(message)


class PeerClosed(TransferFailed):
    """The other end closed in good order, but too early."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where the server of a store listens, and the secret of the run (hex), which no log shows."""

    host: str
    port: int
    secret: str = field(repr=False)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def mac(secret: str, nonce: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(secret.encode(), nonce + number.to_bytes(8, "big") + body, hashlib.sha256)


class Wire:
    """Whole frames over one socket, each within `io_s`, all of them before `ends` (`time.monotonic`)."""

    def __init__(self, sock: socket.socket, io_s: float, ends: float):
        self._socket, self._io_s, self._ends = sock, io_s, ends
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`. Raises `TransferFailed`."""
        limit = self._limit()
        while len(view):
            self._arm(limit)
            try:
                count = self._socket.recv_into(view)
            except TimeoutError as error:
                raise _late() from error
            except OSError as error:
                raise TransferFailed("closed", f"the connection broke: {error}") from error
            if not count:
                raise PeerClosed("closed", "the peer closed the connection (so it does on a wrong token)")
            view = view[count:]

    def receive(self, count: int) -> bytes:
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_or_end(self, count: int) -> bytes | None:
        """None when the peer closed before the first byte. Raises `TransferFailed` when it did so later."""
        data = bytearray(count)
        try:
            self.receive_into(memoryview(data)[:1])
        except PeerClosed:
            return None
        self.receive_into(memoryview(data)[1:])
        return bytes(data)

    def send(self, *parts: bytes | memoryview) -> None:
        """Raises `TransferFailed`."""
        limit = self._limit()
        try:
            for part in parts:
                self._arm(limit)
                self._socket.sendall(part)  # its timeout is for all of the part
        except TimeoutError as error:
            raise _late() from error
        except OSError as error:
            raise TransferFailed("closed", f"the connection broke: {error}") from error

    def send_json(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send(LENGTH.pack(len(body)), body)

    def receive_json(self, length: int, limit: int) -> dict[str, Any]:
        return parse_object(self.receive(_within(length, limit, "a header")))

    def _limit(self) -> float:
        return min(time.monotonic() + self._io_s, self._ends)

    def _arm(self, limit: float) -> None:
        left = limit - time.monotonic()
        if left <= 0:
            raise _late()
        self._socket.settimeout(left)


def parse_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise TransferFailed("protocol", f"a header is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TransferFailed("protocol", f"a header is {type(value).__name__}, not an object")
    return value


def send_stream(wire: Wire, file: BinaryIO, size: int) -> None:
    """`size` bytes from the file's position. Raises `TransferFailed` if it has fewer."""
    buffer = bytearray(min(CHUNK_BYTES, size))
    while size:
        view = memoryview(buffer)[: min(CHUNK_BYTES, size)]
        if file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise TransferFailed("protocol", "a stored file is shorter than it was")
        wire.send(CHUNK.pack(len(view), zlib.crc32(view)), view)
        size -= len(view)


def receive_stream(wire: Wire, size: int, sink: Callable[[memoryview], object]) -> None:
    """Hand on `size` bytes, chunk by chunk, each once its crc was found right. Raises `TransferFailed`."""
    buffer = bytearray(min(CHUNK_BYTES, size))
    while size:
        length, crc = CHUNK.unpack(wire.receive(CHUNK.size))
        view = memoryview(buffer)[: _within(length, min(CHUNK_BYTES, size), "a chunk", at_least=1)]
        wire.receive_into(view)
        if zlib.crc32(view) != crc:
            raise TransferFailed("checksum", f"a chunk of {length} bytes differs from its checksum")
        sink(view)
        size -= length


def pull(
    source: WeightSource,
    version: PolicyVersion,
    digest: str,
    folder: Path,
    deadline_s: float,
    *,
    on_retry: Callable[[str], None],
    check_room: Callable[[int], None],
    io_s: float = IO_DEADLINE_S,
) -> Manifest:
    """Copy one version into `folder`, which exists and is the caller's own. Content is for the caller to verify.

    A transfer that breaks off goes on behind the last good chunk; `on_retry(reason)` is told each time.
    `check_room(n_bytes)` is asked before the first bucket and may raise. Raises `VersionGone` (take the newest
    instead), `CorruptWeights` (the manifest is not that of `digest`), `TransferFailed` when attempts or time are up.
    """
    ends = time.monotonic() + deadline_s
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _pull_once(source, version, digest, folder, ends, check_room, io_s)
        except TransferFailed as error:
            left = ends - time.monotonic()
            if attempt == ATTEMPTS or left <= 0:
                raise TransferFailed(
                    error.reason,
                    f"v{version} from {source.host}:{source.port} failed {attempt} times in {deadline_s:g} s at most, "
                    f"the last time: {error}",
                ) from error
            on_retry(error.reason)
            time.sleep(min(BACKOFF_S * 2**attempt, left))
    raise AssertionError("unreachable")


def _pull_once(
    source: WeightSource,
    version: PolicyVersion,
    digest: str,
    folder: Path,
    ends: float,
    check_room: Callable[[int], None],
    io_s: float,
) -> Manifest:
    with _connected(source, io_s, ends) as sock:
        session = _Session(Wire(sock, io_s, ends), source.secret)
        text = bytearray()
        session.ask({"open": int(version)}, MAX_MANIFEST_BYTES, text.extend)
        manifest = _manifest(bytes(text), version, digest)
        missing = manifest.n_bytes - sum(_size(folder / name) for name in manifest.buckets)
        check_room(missing)
        for name in manifest.buckets:
            # Only what passed its check was written: the file's length is where to go on.
            have = _size(folder / name)
            with (folder / name).open("ab", buffering=0) as file:
                missing -= session.ask({"read": name, "offset": have}, missing, file.write)
        (folder / MANIFEST_NAME).write_bytes(text)
        return manifest


class _Session:
    def __init__(self, wire: Wire, secret: str):
        self._wire, self._secret, self._number = wire, secret, 0
        greeting = wire.receive(len(MAGIC) + NONCE_BYTES)
        if greeting[: len(MAGIC)] != MAGIC:
            raise TransferFailed("protocol", "what listens there serves no weights of this version of the protocol")
        self._nonce = greeting[len(MAGIC) :]

    def ask(self, request: dict[str, Any], limit: int, sink: Callable[[memoryview], object]) -> int:
        """Stream the answer into `sink`, at most `limit` bytes; returns how many."""
        body = json.dumps(request).encode()
        self._wire.send(REQUEST.pack(mac(self._secret, self._nonce, self._number, body), len(body)), body)
        self._number += 1
        answer = self._wire.receive_json(LENGTH.unpack(self._wire.receive(LENGTH.size))[0], MAX_ANSWER_BYTES)
        if "gone" in answer:
            raise VersionGone(str(answer["gone"]))
        size = answer.get("size")
        if not isinstance(size, int):
            raise TransferFailed("protocol", f"an answer without a size: {answer}")
        receive_stream(self._wire, _within(size, limit, "an answer"), sink)
        return size


def _connected(source: WeightSource, io_s: float, ends: float) -> socket.socket:
    timeout_s = min(io_s, ends - time.monotonic())
    if timeout_s <= 0:
        raise _late()
    try:
        return socket.create_connection((source.host, source.port), timeout_s)
    except OSError as error:
        raise TransferFailed("connect", f"cannot connect to {source.host}:{source.port}: {error}") from error


def _manifest(text: bytes, version: PolicyVersion, digest: str) -> Manifest:
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise CorruptWeights(f"the manifest of v{version} cannot be read: {error.errors()[0]['msg']}") from error
    if (manifest.version, manifest.digest) != (version, digest):
        raise CorruptWeights(
            f"asked for v{version} with digest {digest}, got v{manifest.version} with {manifest.digest}"
        )
    if foreign := [name for name in manifest.buckets if not is_bucket_name(name)]:
        raise CorruptWeights(f"the manifest of v{version} names files that are no buckets: {foreign[:3]}")
    return manifest


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _within(length: int, limit: int, what: str, at_least: int = 0) -> int:
    if not at_least <= length <= limit:
        raise TransferFailed("protocol", f"{what} of {length} bytes is outside {at_least} to {limit}")
    return length


def _late() -> TransferFailed:
    return TransferFailed("timeout", "the peer was slower than its deadline")

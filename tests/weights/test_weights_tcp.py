"""Weights over TCP: real sockets, and every way in which a transfer can go wrong."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tcp_relay import peer, relay

from relax.types import PolicyVersion
from relax.weights import tcp
from relax.weights.manifest import CorruptWeights, Manifest, VersionGone
from relax.weights.space import NoSpace
from relax.weights.store import ReadableVersion, WeightStore
from relax.weights.tcp import LENGTH, MAGIC, NONCE_BYTES, REQUEST, TransferFailed, WeightSource, Wire, mac, pull
from relax.weights.tcp_server import WeightServer

BUCKET_BYTES = 1 << 16


def v(number: int) -> PolicyVersion:
    return PolicyVersion(number)


def publish(store: WeightStore, number: int) -> Manifest:
    """About 400 kB in several buckets."""
    generator = torch.Generator().manual_seed(number)
    tensors = [(f"layer.{i}", torch.randn(64, 128, generator=generator)) for i in range(12)]
    return store.publish(v(number), number, tensors, BUCKET_BYTES)


def wait_until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "no such state within its deadline"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(tcp, "BACKOFF_S", 0.001)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", keep=1)


@pytest.fixture
def serve(store: WeightStore) -> Iterator[Callable[..., WeightServer]]:
    """serve(**options) -> a server of the store."""
    made: list[WeightServer] = []

    def start(**options: Any) -> WeightServer:
        made.append(WeightServer(store, "127.0.0.1", options.pop("session_s", 30.0), **options))
        return made[-1]

    yield start
    for server in made:
        server.close()
        with pytest.raises(OSError):
            socket.create_connection((server.source.host, server.source.port), 5.0)


class Puller:
    """Pulls into a folder, and notes the retries."""

    def __init__(self, folder: Path):
        self.folder, self.retries = folder, list[str]()
        folder.mkdir()

    def __call__(self, source: WeightSource, manifest: Manifest, **options: Any) -> Manifest:
        return pull(
            source,
            v(manifest.version),
            options.pop("digest", manifest.digest),
            self.folder,
            options.pop("deadline_s", 30.0),
            on_retry=self.retries.append,
            check_room=options.pop("check_room", lambda n_bytes: None),
            **options,
        )


@pytest.fixture
def puller(tmp_path: Path) -> Puller:
    return Puller(tmp_path / "pulled")


def test_a_pulled_version_is_the_published_one_bit_by_bit(
    store: WeightStore, serve: Callable[..., WeightServer], puller: Puller
) -> None:
    """behaviour: B2"""
    published, server = publish(store, 3), serve()
    assert len(published.buckets) > 3
    room: list[int] = []
    assert puller(server.source, published, check_room=room.append) == published
    assert ReadableVersion(puller.folder).verify() == published.digest
    assert room == [published.n_bytes] and puller.retries == []
    wait_until(lambda: server.counts["served"] == 1)
    manifest_bytes = (puller.folder / "manifest.json").stat().st_size
    assert server.counts == {"served": 1, "bytes": published.n_bytes + manifest_bytes}


def test_a_wrong_secret_gets_no_byte_and_is_counted(
    store: WeightStore, serve: Callable[..., WeightServer], puller: Puller
) -> None:
    published, server = publish(store, 1), serve()
    stranger = WeightSource(server.source.host, server.source.port, "0" * 64)
    with pytest.raises(TransferFailed, match="wrong token"):
        puller(stranger, published)
    assert list(puller.folder.iterdir()) == []
    wait_until(lambda: server.counts["refused_token"] == tcp.ATTEMPTS)
    assert set(server.counts) == {"refused_token"}
    assert "0" * 64 not in repr(stranger), "a log of it shows the secret"


def test_a_request_that_was_overheard_cannot_be_used_again(
    store: WeightStore, serve: Callable[..., WeightServer]
) -> None:
    """The mac of one connection is worth nothing on another, nor as its next request."""
    publish(store, 1)
    server = serve()
    body = json.dumps({"open": 1}).encode()
    with socket.create_connection((server.source.host, server.source.port), 10.0) as first:
        nonce = _read(first, len(MAGIC) + NONCE_BYTES)[len(MAGIC) :]
        frame = REQUEST.pack(mac(server.source.secret, nonce, 0, body), len(body)) + body
        with socket.create_connection((server.source.host, server.source.port), 10.0) as second:
            _read(second, len(MAGIC) + NONCE_BYTES)
            second.sendall(frame)
            assert second.recv(1) == b""
        first.sendall(frame)
        assert _read(first, LENGTH.size)
        first.sendall(frame)
        wait_until(lambda: server.counts["refused_token"] == 2)


@pytest.mark.parametrize("cut_at", [10, 1_000, 150_000, 300_000])
def test_a_stream_that_is_cut_goes_on_behind_the_last_good_chunk(
    store: WeightStore, serve: Callable[..., WeightServer], puller: Puller, cut_at: int
) -> None:
    published, server = publish(store, 1), serve()

    def cut(connection: int, passed: int, data: bytes) -> bytes | None:
        return data if connection or passed + len(data) < cut_at else None

    with relay(server.source, cut) as between:
        puller(between.source, published)
    assert ReadableVersion(puller.folder).verify() == published.digest
    assert puller.retries == ["closed"] and between.connections == 2
    if cut_at == 300_000:
        resumed = server.counts["bytes"]
        assert resumed < 1.35 * published.n_bytes, "what was there already was sent again"


def test_a_flipped_byte_is_noticed_at_its_chunk_and_asked_for_again(
    store: WeightStore, serve: Callable[..., WeightServer], puller: Puller
) -> None:
    """behaviour: B2"""
    published, server = publish(store, 1), serve()

    def flip(connection: int, passed: int, data: bytes) -> bytes:
        if connection == 0 and passed <= 200_000 < passed + len(data):
            damaged = bytearray(data)
            damaged[200_000 - passed] ^= 0xFF
            return bytes(damaged)
        return data

    with relay(server.source, flip) as between:
        puller(between.source, published)
    assert ReadableVersion(puller.folder).verify() == published.digest
    assert puller.retries == ["checksum"]


def test_damage_that_stays_ends_the_transfer_with_its_reason(
    store: WeightStore, serve: Callable[..., WeightServer], puller: Puller
) -> None:
    published, server = publish(store, 1), serve()

    def flip_last(connection: int, passed: int, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if passed > 50_000 else data

    with relay(server.source, flip_last) as between, pytest.raises(TransferFailed, match="failed 4 times") as raised:
        puller(between.source, published)
    assert raised.value.reason in ("checksum", "protocol", "closed")
    assert len(puller.retries) == tcp.ATTEMPTS - 1
    assert not (puller.folder / "manifest.json").exists(), "an unfinished copy looks whole"


def test_a_server_that_says_nothing_is_left_at_the_deadline(puller: Puller, store: WeightStore) -> None:
    published = publish(store, 1)
    with peer(b"") as silent, pytest.raises(TransferFailed) as raised:
        puller(silent, published, io_s=0.05)
    assert raised.value.reason == "timeout" and set(puller.retries) == {"timeout"}
    with peer(b"") as silent, pytest.raises(TransferFailed, match="slower than its deadline"):
        puller(silent, published, deadline_s=0.05)


def test_a_trickle_does_not_stretch_the_deadline_of_a_frame() -> None:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here = listener.accept()[0]

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not ended.wait(0.02):  # the pace, always within the deadline
                    there.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with here, there, pytest.raises(TransferFailed, match="slower than its deadline"):
                Wire(here, 0.3, time.monotonic() + 60.0).receive(500)
        finally:
            ended.set()
            thread.join(10.0)


def test_a_client_that_says_nothing_loses_its_lease(store: WeightStore, serve: Callable[..., WeightServer]) -> None:
    """behaviour: B1. The version is kept while somebody reads it, and no longer than the deadline."""
    publish(store, 1)
    server = serve(io_s=0.3)
    with _opened(server, 1):
        publish(store, 2)
        assert store.versions() == [1, 2]
        wait_until(lambda: server.counts["timeout"] == 1)
        assert store.versions() == [2]


def test_a_session_ends_at_its_deadline_however_busy_it_is(
    store: WeightStore, serve: Callable[..., WeightServer]
) -> None:
    publish(store, 1)
    server = serve(session_s=0.3, io_s=120.0)
    with _opened(server, 1) as sock:
        wait_until(lambda: server.counts["timeout"] == 1)
        assert sock.recv(1) == b""


@pytest.mark.parametrize("length", [tcp.MAX_REQUEST_BYTES + 1, 2**32 - 1])
def test_an_oversized_request_is_refused_unread(
    store: WeightStore, serve: Callable[..., WeightServer], length: int
) -> None:
    publish(store, 1)
    server = serve()
    with socket.create_connection((server.source.host, server.source.port), 10.0) as sock:
        _read(sock, len(MAGIC) + NONCE_BYTES)
        sock.sendall(REQUEST.pack(b"\0" * 32, length))
        assert sock.recv(1) == b""
    wait_until(lambda: server.counts["refused_frame"] == 1)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "serves no weights"),
        (MAGIC + b"n" * NONCE_BYTES + LENGTH.pack(2**32 - 1), "a header of 4294967295 bytes"),
        (MAGIC + b"n" * NONCE_BYTES + LENGTH.pack(3) + b"[1]", "not an object"),
        (MAGIC + b"n" * NONCE_BYTES + LENGTH.pack(15) + b'{"size": 1e300}', "without a size"),
        (MAGIC + b"n" * NONCE_BYTES + LENGTH.pack(18) + b'{"size": 99999999}', "an answer of 99999999 bytes"),
        (
            MAGIC + b"n" * NONCE_BYTES + LENGTH.pack(13) + b'{"size": 100}' + struct.pack("!II", 101, 0),
            "a chunk of 101",
        ),
    ],
    ids=["another server", "oversized header", "no object", "no size", "oversized answer", "oversized chunk"],
)
def test_what_a_false_server_says_is_refused_before_it_is_read(
    store: WeightStore, puller: Puller, answer: bytes, text: str
) -> None:
    published = publish(store, 1)
    with peer(answer) as false, pytest.raises(TransferFailed, match=text) as raised:
        puller(false, published)
    assert raised.value.reason == "protocol"
    assert list(puller.folder.iterdir()) == []


def test_a_superseded_version_is_kept_until_its_transfer_is_done(
    store: WeightStore, serve: Callable[..., WeightServer], puller: Puller
) -> None:
    """behaviour: B1 B4"""
    published, server = publish(store, 1), serve()
    seen: list[list[int]] = []

    def supersede(connection: int, passed: int, data: bytes) -> bytes:
        if passed > 100_000 and not seen:
            publish(store, 2)
            publish(store, 3)
            seen.append([int(version) for version in store.versions()])
        return data

    with relay(server.source, supersede) as between:
        puller(between.source, published)
    assert ReadableVersion(puller.folder).verify() == published.digest
    assert seen == [[1, 3]] and puller.retries == []
    wait_until(lambda: store.versions() == [3])


def test_a_version_that_is_gone_is_told_apart_and_never_mixed_with_a_newer_one(
    store: WeightStore, serve: Callable[..., WeightServer], puller: Puller
) -> None:
    """behaviour: B4"""
    published, server = publish(store, 1), serve()

    def die(connection: int, passed: int, data: bytes) -> bytes | None:
        if connection == 0 and passed > 100_000:
            return None
        if connection == 1 and passed == 0:
            wait_until(lambda: server.counts["closed"] == 1)  # the first lease has ended
            publish(store, 2)
        return data

    with relay(server.source, die) as between, pytest.raises(VersionGone, match="v1 is not published"):
        puller(between.source, published)
    assert puller.retries == ["closed"] and server.counts["gone"] == 1
    assert not (puller.folder / "manifest.json").exists()


def test_another_manifest_than_the_published_one_is_refused(
    store: WeightStore, serve: Callable[..., WeightServer], puller: Puller
) -> None:
    """behaviour: B2"""
    published, server = publish(store, 1), serve()
    with pytest.raises(CorruptWeights, match="asked for v1 with digest 00"):
        puller(server.source, published, digest="00")
    path = store.root / "v00000001" / "manifest.json"
    path.write_text(path.read_text().replace("bucket-00002.safetensors", "../../stolen"))
    with pytest.raises(CorruptWeights, match="no buckets"):
        puller(server.source, published)
    assert list(puller.folder.iterdir()) == []


def test_only_buckets_of_the_opened_version_are_served(store: WeightStore, serve: Callable[..., WeightServer]) -> None:
    publish(store, 1)
    server = serve()
    for number, request in enumerate(({"read": "../v00000001/manifest.json", "offset": 0}, {"read": None}), start=1):
        with _opened(server, 1) as sock:
            _ask(sock, server, request, 1)
            wait_until(lambda n=number: server.counts["refused_frame"] == n)  # type: ignore[misc]


def test_too_many_connections_are_refused_and_counted(
    store: WeightStore, serve: Callable[..., WeightServer], puller: Puller
) -> None:
    published, server = publish(store, 1), serve(max_sessions=1)
    with _opened(server, 1):
        with pytest.raises(TransferFailed) as raised:
            puller(server.source, published)
        assert raised.value.reason == "closed" and server.counts["refused_full"] == tcp.ATTEMPTS
    wait_until(lambda: server.counts["closed"] == 1)
    puller(server.source, published)


def test_too_little_room_is_found_before_a_bucket_is_asked_for(
    store: WeightStore, serve: Callable[..., WeightServer], puller: Puller
) -> None:
    """behaviour: B47"""
    published, server = publish(store, 1), serve()

    def full(n_bytes: int) -> None:
        raise NoSpace("weights v1", puller.folder, n_bytes, 0, 0, "free some")

    with pytest.raises(NoSpace):
        puller(server.source, published, check_room=full)
    assert list(puller.folder.iterdir()) == []


def test_nobody_there_is_told_with_the_address(puller: Puller, store: WeightStore) -> None:
    published = publish(store, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(TransferFailed, match=f"127.0.0.1:{port}") as raised:
        puller(WeightSource("127.0.0.1", port, "s"), published)
    assert raised.value.reason == "connect"


class _opened:
    """A connection that has opened a version and read nothing but the greeting."""

    def __init__(self, server: WeightServer, version: int):
        self._server, self._version = server, version

    def __enter__(self) -> socket.socket:
        source = self._server.source
        self._socket = socket.create_connection((source.host, source.port), 20.0)
        self.nonce = _read(self._socket, len(MAGIC) + NONCE_BYTES)[len(MAGIC) :]
        _nonces[self._socket] = self.nonce
        _ask(self._socket, self._server, {"open": self._version}, 0)
        size = json.loads(_read(self._socket, LENGTH.unpack(_read(self._socket, LENGTH.size))[0]))["size"]
        while size > 0:
            length, _ = struct.unpack("!II", _read(self._socket, 8))
            _read(self._socket, length)
            size -= length
        return self._socket

    def __exit__(self, *_: object) -> None:
        del _nonces[self._socket]
        self._socket.close()


_nonces: dict[socket.socket, bytes] = {}


def _ask(sock: socket.socket, server: WeightServer, request: dict[str, Any], number: int) -> None:
    body = json.dumps(request).encode()
    sock.sendall(REQUEST.pack(mac(server.source.secret, _nonces[sock], number, body), len(body)) + body)


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, "the server closed"
        data += part
    return data

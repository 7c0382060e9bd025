"""Serves the versions of a store over TCP; the protocol is in `relax.weights.tcp`."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import socketserver
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from relax.types import PolicyVersion
from relax.weights.manifest import MANIFEST_NAME, VersionGone, read_manifest
from relax.weights.store import WeightStore, version_folder
from relax.weights.tcp import (
    IO_DEADLINE_S,
    MAGIC,
    MAX_REQUEST_BYTES,
    NONCE_BYTES,
    REQUEST,
    TransferFailed,
    WeightSource,
    Wire,
    mac,
    parse_object,
    send_stream,
)

logger = logging.getLogger(__name__)

MAX_SESSIONS = 64
"""Connections at once: one puller of each node, and room for those that get no further than the greeting."""
CLOSE_S = 5.0


class Refused(Exception):
    """The peer gets no answer; `reason` is counted."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)


class WeightServer:
    """One thread accepts, one more per connection. `counts`: sessions by how they ended, and bytes sent.

    `served` (the peer took every bucket and left), `refused_token`, `refused_frame`, `refused_full`, `gone` (the
    version was collected), `closed`, `timeout`, `protocol`; `bytes`. `session_s`: a connection, and
    so its lease, ends then.
    """

    def __init__(
        self,
        store: WeightStore,
        host: str,
        session_s: float,
        *,
        io_s: float = IO_DEADLINE_S,
        max_sessions: int = MAX_SESSIONS,
    ):
        self.counts: Counter[str] = Counter()
        self._store, self._session_s, self._io_s = store, session_s, io_s
        self._lock = threading.Lock()
        self._sessions: dict[socket.socket, threading.Thread] = {}
        self._room = threading.Semaphore(max_sessions)
        self._server = _Listener(self, host)
        self.source = WeightSource(host, self._server.server_address[1], secrets.token_hex(32))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="weights-tcp", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and their leases."""
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            sessions = dict(self._sessions)
        for sock in sessions:
            with contextlib.suppress(OSError):  # it may have ended by itself
                sock.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + CLOSE_S
        for thread in (self._thread, *sessions.values()):
            thread.join(max(0.0, end - time.monotonic()))

    def counted(self) -> dict[str, int]:
        """A copy of `counts`, which other threads change."""
        with self._lock:
            return dict(self.counts)

    def admit(self) -> bool:
        if self._room.acquire(blocking=False):
            return True
        self._count("refused_full")
        return False

    def run(self, sock: socket.socket) -> None:
        """One connection, in its own thread."""
        with self._lock:
            self._sessions[sock] = threading.current_thread()
        try:
            self._count(self._session(Wire(sock, self._io_s, time.monotonic() + self._session_s)))
        finally:
            with self._lock:
                del self._sessions[sock]
            self._room.release()

    def _session(self, wire: Wire) -> str:
        """How it ended."""
        version: PolicyVersion | None = None
        try:
            nonce = secrets.token_bytes(NONCE_BYTES)
            wire.send(MAGIC, nonce)
            request = self._request(wire, nonce, 0)
            if request is None:
                raise Refused("closed")
            version = self._pin(request)
            self._send(wire, version_folder(self._store.root, version) / MANIFEST_NAME, 0)
            buckets = read_manifest(version_folder(self._store.root, version)).buckets
            left, number = set(buckets), 1
            while (request := self._request(wire, nonce, number)) is not None:
                name, offset = request.get("read"), request.get("offset")
                if name not in buckets or not isinstance(offset, int) or offset < 0:
                    raise Refused("refused_frame")
                self._send(wire, version_folder(self._store.root, version) / name, offset)
                left.discard(name)
                number += 1
            return "closed" if left else "served"
        except VersionGone as error:
            return self._say_gone(wire, error)
        except Refused as error:
            return error.reason
        except TransferFailed as error:
            return error.reason
        finally:
            if version is not None:
                self._store.unpin(version)
                self._store.collect()

    def _request(self, wire: Wire, nonce: bytes, number: int) -> dict[str, Any] | None:
        """None when the peer has closed between two requests. Raises `Refused` before it looks into the body."""
        first = wire.receive_or_end(REQUEST.size)
        if first is None:
            return None
        given, length = REQUEST.unpack(first)
        if length > MAX_REQUEST_BYTES:
            raise Refused("refused_frame")
        body = wire.receive(length)
        if not hmac.compare_digest(given, mac(self.source.secret, nonce, number, body)):
            raise Refused("refused_token")
        return parse_object(body)

    def _pin(self, request: dict[str, Any]) -> PolicyVersion:
        wanted = request.get("open")
        if not isinstance(wanted, int) or wanted < 0:
            raise Refused("refused_frame")
        self._store.pin(PolicyVersion(wanted))
        return PolicyVersion(wanted)

    def _send(self, wire: Wire, path: Path, offset: int) -> None:
        with path.open("rb", buffering=0) as file:
            size = max(0, os.fstat(file.fileno()).st_size - offset)
            file.seek(offset)
            wire.send_json({"size": size})
            send_stream(wire, file, size)
        self._count("bytes", size)

    def _say_gone(self, wire: Wire, error: VersionGone) -> str:
        try:
            wire.send_json({"gone": str(error)})
        except TransferFailed as failed:
            return failed.reason
        return "gone"

    def _count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[what] += amount


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, owner: WeightServer, host: str):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._owner = owner
        super().__init__((host, 0), socketserver.BaseRequestHandler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._owner.admit()

    def finish_request(self, request: Any, client_address: Any) -> None:
        self._owner.run(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.exception("serving weights to %s failed", client_address)

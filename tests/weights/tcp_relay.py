"""A relay in front of a weight server that damages what it passes on."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from relax.weights.tcp import WeightSource

Mangle = Callable[[int, int, bytes], bytes | None]
"""(number of the connection, bytes passed before, data) -> what to pass on instead; None: cut the connection."""


class Relay:
    """`source`: as the server's, but through here. Only what the server sends is mangled."""

    def __init__(self, behind: WeightSource, mangle: Mangle):
        self._behind, self._mangle = behind, mangle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.source = WeightSource("127.0.0.1", self._listener.getsockname()[1], behind.secret)
        self.connections = 0
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._behind.host, self._behind.port), 10.0)
                self._open += [client, server]
                number, self.connections = self.connections, self.connections + 1
                for pump in (
                    lambda c=client, s=server: self._up(c, s),
                    lambda c=client, s=server, n=number: self._down(n, s, c),
                ):
                    self._threads.append(threading.Thread(target=pump, daemon=True))
                    self._threads[-1].start()

    @staticmethod
    def _up(client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _down(self, number: int, server: socket.socket, client: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 12):
                out = self._mangle(number, passed, data)
                passed += len(data)
                if out is None:
                    break
                client.sendall(out)
        for sock in (client, server):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()  # shut down alone, it would still take in what the server sends

    def close(self) -> None:
        # Closing alone does not wake the thread that waits in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sock in [*self._open, self._listener]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(10.0)


@contextlib.contextmanager
def relay(behind: WeightSource, mangle: Mangle) -> Iterator[Relay]:
    made = Relay(behind, mangle)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def peer(answer: bytes) -> Iterator[WeightSource]:
    """Something that listens, sends `answer` to whoever connects, and then says nothing more."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(listener.accept()[0])
                taken[-1].sendall(answer)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield WeightSource("127.0.0.1", listener.getsockname()[1], "secret")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10.0)
        for sock in [*taken, listener]:
            sock.close()

"""The Ray actors of the bus, as whoever starts them sees them.

TransferQueue and torch are imported within the actor: the process that creates a bus, or asks it something,
loads neither.
"""

from __future__ import annotations

from typing import Any

import ray

from bus.errors import BusError
from bus.index import Limits
from bus.wire import pack_call, unpack_call


class EngineHost:
    """Runs a `bus.engine.BusEngine`, whose public methods `call` reaches by name."""

    def __init__(self, host: str, ports: tuple[int, int], limits: Limits) -> None:
        from bus.engine import BusEngine

        self._engine = BusEngine(host, ports, limits)

    async def call(self, method: str, *arguments: Any) -> Any:
        return await _public(self._engine, method)(*arguments)

    async def ask(self, method: str, arguments: bytes) -> bytes:
        """As `call`, for the many records of a batch: see `bus.wire`."""
        return pack_call(await _public(self._engine, method)(*unpack_call(arguments)))


class StorageHost:
    """Runs a `bus.engine.BusStorage`."""

    def __init__(self, host: str, port: int) -> None:
        from bus.engine import BusStorage

        self._storage = BusStorage(host, port)

    def call(self, method: str, *arguments: Any) -> Any:
        return _public(self._storage, method)(*arguments)


def _public(target: Any, method: str) -> Any:
    if method.startswith("_"):
        raise BusError(f"{method!r} is not a call of the bus")
    return getattr(target, method)


EngineActor = ray.remote(EngineHost)
StorageActor = ray.remote(StorageHost)

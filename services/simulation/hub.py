"""The bus of a simulated run: the real engine, index and client, with a network between them that loses and delays.

BusClient ─ Core ─ Wire ┬─ call lost ──────────────▷ (the caller times out)
                        └─▷ SimulatedEngine ─ Index ─┬─ answer lost ──▷ (the caller times out, and tries again)
                                                     └─▷ answer
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import RayActorError

from bus.client import BusClient
from bus.core import Attachment, Core
from bus.engine import BusEngine
from bus.errors import BusError, BusUnavailable
from bus.index import Index, Limits
from bus.index.state import Garbage
from bus.records import BusAddress
from bus.wire import pack_call, unpack_call
from relax.config.run import BusConfig
from services.simulation.virtual import Process

T = TypeVar("T")
ATTACH_RETRY_S = 0.2
CONNECT_S = 600.0
"""Longer than a process stands still, and is not taken for dead."""
ADDRESS = BusAddress("simulated", "simulated", "engine", ("store",))


@dataclass(frozen=True, slots=True)
class Network:
    """Times in seconds. `lost_share`: of the calls, half of them before and half of them after they are executed."""

    latency_s: float = 0.002
    jitter_s: float = 0.003
    lost_share: float = 0.0


class SimulatedEngine(BusEngine):
    """All of the engine but TransferQueue. `after_call` looks at the index after each call."""

    def __init__(self, limits: Limits, epoch: str, after_call: Callable[[Index], None]) -> None:
        self._lock = _NoLock()  # type: ignore[assignment]  # one thread
        self.epoch = epoch
        self._index = Index(limits, epoch)
        self._waiters = {}
        self._waiting_for = {}
        self._sweeping = None
        self._loop = asyncio.get_running_loop()
        self.zmq_server_info, self._store_infos = None, {}
        self._slots = itertools.count()
        self._after_call = after_call
        self.blobs: dict[tuple[int, str], Any] = {}
        self._stores = [_Handle({"free": self._free})]
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def index(self) -> Index:
        return self._index

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _run(self, operation: Callable[[float], T]) -> T | BusError:
        reply = super()._run(operation)
        self._after_call(self._index)
        return reply

    def commit(self, body: dict[str, Any]) -> dict[str, Any]:
        """The notice that bytes are stored, and its answer."""
        return self._noticed(body)

    def _commit(self, caller: Any, body: dict[str, Any], now: float) -> Any:
        self._index.check_planned(body["put_id"])
        return self._index.commit_put(caller, body["put_id"], now)

    def _allocate(self, partition: str) -> int:
        return next(self._slots)

    async def _free(self, slots: list[int]) -> None:
        freed = set(slots)
        self.blobs = {key: blob for key, blob in self.blobs.items() if key[0] not in freed}

    def _freed(self, garbage: list[Garbage], now: float) -> None:
        self._index.freed(garbage)
        self._index.take_empty_partitions()

    async def ping(self) -> str:
        return self.epoch


class Hub:
    """Bus after bus of one run. `after_call`: of every call to whichever is there."""

    def __init__(
        self, limits: Limits, config: BusConfig, network: Network, seed: int, after_call: Callable[[Index], None]
    ) -> None:
        self._limits, self._config, self._network = limits, config, network
        self._rng = random.Random(seed)
        self._after_call = after_call
        self._epochs = itertools.count(1)
        self.engine: SimulatedEngine | None = None
        self.lost_calls = self.lost_answers = 0

    def start(self) -> None:
        """An empty bus of another epoch."""
        self.engine = SimulatedEngine(self._limits, f"epoch-{next(self._epochs)}", self._after_call)

    def die(self) -> None:
        """Engine and storage are gone, with all that they held."""
        assert self.engine is not None
        self.engine.gone.set_result(None)
        self.engine = None

    async def connect(self, process: Process, owner: str) -> BusClient:
        """A client of this process, as a new incarnation of `owner`. Raises `BusUnavailable`."""
        at = await self.attach(process, owner, CONNECT_S)
        core = _HubCore(self, process, owner, self._config, at)
        return BusClient(_Inline(), core)  # type: ignore[arg-type]

    async def attach(self, process: Process, owner: str, deadline_s: float) -> Attachment:
        """To the bus that is there, or comes within the deadline."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        while True:
            if self.engine is not None:
                wire = Wire(self, self.engine, process)
                try:
                    answer = await wire.call.remote("register", owner)
                except RayActorError:
                    answer = BusUnavailable("it died at once")
                if not isinstance(answer, BusError):
                    return Attachment(wire, _SimulatedStore(wire), answer)  # type: ignore[arg-type]
            if loop.time() + ATTACH_RETRY_S > deadline:
                raise BusUnavailable("no bus came up")
            await asyncio.sleep(ATTACH_RETRY_S)

    async def delay(self, process: Process) -> None:
        """One way through the network; who is stopped neither sends nor hears."""
        await asyncio.sleep(self._network.latency_s + self._network.jitter_s * self._rng.random())
        now = asyncio.get_running_loop().time()
        if process.paused_until > now:
            await asyncio.sleep(process.paused_until - now)

    def loses(self) -> bool:
        return self._rng.random() < self._network.lost_share / 2


class Wire:
    """Stands in for Ray's handle of the engine, in one process: `call.remote(...)`, `ask.remote(...)`."""

    def __init__(self, hub: Hub, engine: SimulatedEngine, process: Process) -> None:
        self._hub, self.engine, self._process = hub, engine, process
        self.call = _Remote(self._call)
        self.ask = _Remote(self._ask)

    async def _call(self, method: str, *arguments: Any) -> Any:
        may_be_lost = method not in ("register", "endpoints")  # the start of a process is tried by its supervisor
        return await self.send(lambda: getattr(self.engine, method)(*arguments), may_be_lost=may_be_lost)

    async def _ask(self, method: str, arguments: bytes) -> bytes:
        unpacked = unpack_call(arguments)
        return pack_call(await self.send(lambda: getattr(self.engine, method)(*unpacked)))

    async def send(self, work: Callable[[], Awaitable[T]], *, may_be_lost: bool = True) -> T:
        """There, done and back. Raises `RayActorError` when the engine is gone, or whoever asks is."""
        self._alive()
        await self._hub.delay(self._process)
        self._alive()
        if may_be_lost and self._hub.loses():
            self._hub.lost_calls += 1
            await _for_ever()
        lost = may_be_lost and self._hub.loses()
        # In no process: who called may die, and the engine goes on with what it was asked.
        task = asyncio.get_running_loop().create_task(_awaited(work()), context=contextvars.Context())
        either: tuple[asyncio.Future[Any], ...] = (task, self.engine.gone)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise RayActorError
        if lost:
            self._hub.lost_answers += 1
            await _for_ever()
        await self._hub.delay(self._process)
        return task.result()

    def _alive(self) -> None:
        if self.engine.gone.done() or not self._process.alive:
            raise RayActorError


class _Remote:
    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self.remote = function


class _Handle:
    """Of an actor whose methods are `functions`."""

    def __init__(self, functions: dict[str, Callable[..., Awaitable[Any]]]) -> None:
        self.call = _Remote(lambda method, *arguments: functions[method](*arguments))


class _SimulatedStore:
    """Stands in for `bus.transport.BlobStore`, which sends again what gets lost on the way to a storage that lives. A
    dead one does not answer."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def write(self, column: str, slots: list[int], blobs: list[Any]) -> None:
        async def work() -> None:
            self._wire.engine.blobs.update({(slot, column): blob for slot, blob in zip(slots, blobs, strict=True)})

        await self._answer(work)

    async def read(self, columns: tuple[str, ...], slots: list[int]) -> dict[tuple[int, str], Any]:
        async def work() -> dict[tuple[int, str], Any]:
            return {(slot, column): self._wire.engine.blobs[slot, column] for slot in slots for column in columns}

        return await self._answer(work)

    async def commit(self, body: dict[str, Any]) -> dict[str, Any]:
        async def work() -> dict[str, Any]:
            return self._wire.engine.commit(body)

        return await self._answer(work, may_be_lost=True)

    async def _answer(self, work: Callable[[], Awaitable[T]], *, may_be_lost: bool = False) -> T:
        try:
            return await self._wire.send(work, may_be_lost=may_be_lost)
        except RayActorError:
            await _for_ever()
            raise

    def close(self) -> None:
        """Nothing is open."""


class _HubCore(Core):
    def __init__(self, hub: Hub, process: Process, owner: str, config: BusConfig, at: Attachment) -> None:
        super().__init__(ADDRESS, owner, config, at)
        self._hub, self._process = hub, process

    async def _attach(self, owner: str, rows: bool, deadline_s: float) -> Attachment:
        return await self._hub.attach(self._process, owner, deadline_s)


class _Inline:
    """Stands in for the client's loop in a thread of its own."""

    async def run(self, coroutine: Awaitable[T]) -> T:
        return await coroutine

    def stop(self) -> None:
        """There is no thread."""


class _NoLock:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()

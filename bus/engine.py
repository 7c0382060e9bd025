"""The processes of the bus: the engine (TransferQueue's controller plus the index) and its stores.

The engine is one asyncio Ray actor. TransferQueue's request thread and the actor's event loop both
enter it; one lock keeps each call to the index and to TransferQueue's own state atomic. A waiting
consumer waits here, on a future that the change it waits for completes: nobody polls.

    client --plan_put--> engine      slots are allocated, nothing is visible
    client --bytes-----> store
    client --notice----> engine      TransferQueue records production, then the index commits
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from itertools import groupby
from typing import Any, TypeVar

from bus.errors import BusError, BusUnavailable, StaleEpoch
from bus.index import Index, Limits
from bus.index.state import Garbage
from bus.records import (
    DRAIN,
    AckResult,
    BusStats,
    Caller,
    Closed,
    Empty,
    Event,
    Grant,
    LeaseRequest,
    PutPlan,
    Rollback,
    RowHeader,
    TrainedStep,
    Verdict,
)
from bus.tq import SequentialSampler, ZMQMessage, ZMQRequestType, ZMQServerInfo
from bus.tq import controller as tq_controller
from bus.tq import simple_storage as tq_storage

_Controller: Any = tq_controller.TransferQueueController.__ray_metadata__.modified_class
_StorageUnit: Any = tq_storage.SimpleStorageUnit.__ray_metadata__.modified_class

QUARANTINE_S = 120.0
"""A freed slot is not given out again before every writer that could still know it has given up."""

GC_THRESHOLDS = (10_000, 20, 20)
"""A put makes thousands of small objects that live as long as their rows; few are ever part of a cycle."""

T = TypeVar("T")


class FixedPorts:
    """Stands in for TransferQueue's `get_free_port`: hands out the given ports once each.

    TransferQueue retries for ever when it cannot bind; running out of ports ends that.
    """

    def __init__(self, ports: tuple[int, ...]) -> None:
        self._ports = list(ports)

    def __call__(self, ip: str) -> int:
        if not self._ports:
            raise OSError(f"a port of the bus on {ip} was taken by somebody else")
        return self._ports.pop(0)


class BusStorage(_StorageUnit):  # type: ignore[misc]
    """One storage process, on one interface and one port."""

    def __init__(self, host: str, port: int) -> None:
        tq_storage.get_node_ip_address = lambda: host
        tq_storage.get_free_port = FixedPorts((port,))
        super().__init__({"num_data_storage_units": 1, "total_storage_size": None})

    def free(self, slots: list[int]) -> None:
        """Drop these storage rows. Runs beside the request thread: each step is atomic."""
        for column in list(self.storage_data.field_data.values()):
            for slot in slots:
                column.pop(slot, None)
        self.storage_data._active_keys.difference_update(slots)

    def ping(self) -> bool:
        return bool(self.worker_thread.is_alive() and self.proxy_thread.is_alive())


class BusEngine(_Controller):  # type: ignore[misc]
    """Every public method takes the caller first, answers with a value, and returns BusErrors
    instead of raising them: an error of a caller is no failure of the actor."""

    def __init__(self, host: str, ports: tuple[int, int], limits: Limits) -> None:
        self._lock = threading.RLock()
        self.epoch = uuid.uuid4().hex
        self._index = Index(limits, self.epoch)
        self._waiters: dict[str, dict[asyncio.Future[None], None]] = {}
        """Topic -> those who wait, in the order in which they came."""
        self._waiting_for: dict[str, asyncio.Task[Any] | None] = {}
        self._quarantine: deque[tuple[float, str, list[int]]] = deque()
        self._empty_partitions: set[str] = set()
        self._sweeping: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stores: list[Any] = []
        self._store_infos: dict[str, ZMQServerInfo] = {}
        tq_controller.get_node_ip_address = lambda: host
        tq_controller.get_free_port = FixedPorts(ports)
        super().__init__(sampler=SequentialSampler, polling_mode=True)

    async def start(self, stores: list[Any]) -> str:
        """Take the storage actors. Returns the epoch."""
        self._loop = asyncio.get_running_loop()
        infos = await asyncio.gather(*(store.call.remote("get_zmq_server_info") for store in stores))
        # What start-up left behind is not garbage: the collector need not look through it again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self._stores = stores
        self._store_infos = {info.id: info for info in infos}
        return self.epoch

    async def ping(self) -> str:
        """The epoch, once all stores have answered; raises what the dead one raises."""
        alive = await asyncio.gather(*(store.call.remote("ping") for store in self._stores))
        if not all(alive) or not self.process_request_thread.is_alive():
            raise BusUnavailable("a thread of the bus has ended")
        return self.epoch

    # -- calls -------------------------------------------------------------------------------

    async def register(self, owner: str) -> Caller | BusError:
        if not self._stores:  # found by its name before `start` was through
            return BusUnavailable("the bus is starting")
        return self._run(lambda now: self._index.register(owner, now))

    async def endpoints(self) -> tuple[ZMQServerInfo, dict[str, ZMQServerInfo]]:
        """Where TransferQueue listens: its controller and its storage units."""
        return self.zmq_server_info, self._store_infos

    async def plan_put(
        self, caller: Caller, put_id: str, rows: tuple[RowHeader, ...], lease_id: str | None, ack: bool, wait_s: float
    ) -> PutPlan | Empty | BusError:
        def plan(now: float) -> PutPlan | Empty:
            return self._index.plan_put(caller, put_id, rows, lease_id, ack, now, self._allocate) or Empty("budget")

        return await self._poll("space", wait_s, caller, plan)

    async def tombstone(
        self, caller: Caller, group_id: str, k: int, reason: str, lease_id: str | None
    ) -> bool | BusError:
        return self._call(caller, lambda now: self._index.tombstone(caller, group_id, k, reason, lease_id, now))

    async def lease(self, caller: Caller, request: LeaseRequest, wait_s: float) -> Grant | Empty | Closed | BusError:
        self._waiting_for[request.lease_id] = asyncio.current_task()
        try:
            return await self._poll(request.task, wait_s, caller, lambda now: self._index.lease(caller, request, now))
        finally:
            self._waiting_for.pop(request.lease_id, None)

    async def withdraw(self, caller: Caller, lease_id: str) -> int | BusError:
        """The caller no longer waits for this lease: end its call, and return what it may have got."""
        waiting = self._waiting_for.get(lease_id)
        if waiting is not None:
            waiting.cancel()
        if not self._index.is_leased(lease_id):
            return 0
        return self._call(caller, lambda now: self._index.release(caller, lease_id, None, DRAIN, now))

    async def extend(self, caller: Caller, lease_id: str) -> float | BusError:
        return self._call(caller, lambda now: self._index.extend(caller, lease_id, now))

    async def ack(
        self, caller: Caller, lease_id: str, items: tuple[str, ...] | None, step: int | None
    ) -> AckResult | BusError:
        return self._call(caller, lambda now: self._index.ack(caller, lease_id, items, step, now))

    async def commit_step(self, caller: Caller, trained: TrainedStep) -> AckResult | BusError:
        return self._call(caller, lambda now: self._index.commit_step(caller, trained, now))

    async def release(
        self, caller: Caller, lease_id: str, items: tuple[str, ...] | None, reason: str
    ) -> int | BusError:
        return self._call(caller, lambda now: self._index.release(caller, lease_id, items, reason, now))

    async def judge(self, caller: Caller, verdicts: tuple[Verdict, ...]) -> int | BusError:
        return self._call(caller, lambda now: self._index.judge(caller, verdicts, now))

    async def drop(self, caller: Caller, group_id: str, reason: str) -> bool | BusError:
        return self._call(caller, lambda now: self._index.drop(caller, group_id, reason, now))

    async def events(self, caller: Caller, after: int, wait_s: float) -> list[Event] | Empty | BusError:
        return await self._poll("events", wait_s, caller, lambda now: self._index.events(caller, after, now) or Empty())

    async def seed(self, caller: Caller, fates: dict[str, int], through_step: int, lineage: int) -> bool | BusError:
        return self._call(caller, lambda now: self._index.seed(caller, fates, through_step, lineage, now))

    async def recommit(self, caller: Caller, steps: tuple[TrainedStep, ...], wait_s: float) -> int | Empty | BusError:
        def repeat(now: float) -> int | Empty:
            known = self._index.recommit(caller, steps, now)
            return Empty("unseeded") if known is None else known

        return await self._poll("seed", wait_s, caller, repeat)

    async def close_topic(self, caller: Caller, topic: str) -> BusError | None:
        return self._call(caller, lambda now: self._index.close_topic(caller, topic, now))

    async def set_version(self, caller: Caller, version: int, of_step: int, step: int) -> BusError | None:
        return self._call(caller, lambda now: self._index.set_version(caller, version, of_step, step, now))

    async def gc(self, caller: Caller, through_step: int) -> int | BusError:
        return self._call(caller, lambda now: self._index.gc(caller, through_step, now))

    async def collect_eval(self, caller: Caller, group_ids: tuple[str, ...]) -> int | BusError:
        return self._call(caller, lambda now: self._index.collect_eval(caller, group_ids, now))

    async def rollback(self, caller: Caller, to: Rollback) -> bool | BusError:
        return self._call(caller, lambda now: self._index.rollback(caller, to, now))

    async def open_groups(self, caller: Caller) -> dict[str, bool] | BusError:
        return self._call(caller, lambda now: self._index.open_groups(caller, now))

    async def stats(self) -> BusStats | BusError:
        return self._run(self._index.stats)

    def _now(self) -> float:
        """Seconds, of one clock for all calls."""
        return time.monotonic()

    # -- entering the index ------------------------------------------------------------------

    def _call(self, caller: Caller, operation: Callable[[float], T]) -> T | BusError:
        if caller.epoch != self.epoch:
            return StaleEpoch(f"the bus restarted: its epoch is {self.epoch}, the call came from {caller.epoch}")
        return self._run(operation)

    def _run(self, operation: Callable[[float], T]) -> T | BusError:
        reply: T | BusError
        with self._lock:
            try:
                reply = operation(self._now())
            except BusError as error:
                reply = error
            woken = self._index.take_woken()
        if woken:
            self._wake(woken)
        return reply

    async def _poll(
        self, topic: str, wait_s: float, caller: Caller, operation: Callable[[float], T | Empty]
    ) -> T | Empty | BusError:
        """Try, and again after each change of `topic`, until there is an answer or time is up."""
        deadline = self._now() + wait_s
        while True:
            changed = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(topic, {})[changed] = None
            try:
                reply = self._call(caller, operation)
                left = deadline - self._now()
                if not isinstance(reply, Empty) or left <= 0:
                    return reply
                expiry = self._index.next_expiry()
                until_expiry = left if expiry is None else max(0.0, expiry - self._now())
                await asyncio.wait([changed], timeout=min(left, until_expiry))
            finally:
                del self._waiters[topic][changed]

    def _wake(self, woken: set[str]) -> None:
        """Complete the futures of those who wait for these topics. Called from either thread."""
        if self._loop is None:
            return
        try:
            on_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            on_loop = False
        if on_loop:
            self._wake_here(woken)
        else:
            self._loop.call_soon_threadsafe(self._wake_here, woken)

    def _wake_here(self, woken: set[str]) -> None:
        for topic in sorted(woken):
            for waiter in self._waiters.get(topic, ()):
                if not waiter.done():
                    waiter.set_result(None)
        if "collector" in woken and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    # -- TransferQueue's side ----------------------------------------------------------------

    def _handle_request(self, request_msg: ZMQMessage, monitor: Any) -> ZMQMessage | None:
        """Of TransferQueue's requests only the notice is served: the rest could bypass the index,
        or write files wherever the sender says."""
        if request_msg.request_type != ZMQRequestType.NOTIFY_DATA_UPDATE:
            return self._make_error_response(request_msg.sender_id, "the bus does not serve this request")
        with self._lock:
            return super()._handle_request(request_msg, monitor)

    def _handle_notify_data_update_request(self, request_msg: ZMQMessage) -> ZMQMessage:
        """Record production, then commit the put: the answer says what became visible."""
        answer = self._noticed(request_msg.body)
        return self._make_response(request_msg, ZMQRequestType.NOTIFY_DATA_UPDATE_ACK, answer)

    def _noticed(self, body: dict[str, Any]) -> dict[str, Any]:
        caller = Caller(*body["caller"])
        reply = self._call(caller, lambda now: self._commit(caller, body, now))
        if isinstance(reply, BusError):
            return {"error": type(reply).__name__, "message": str(reply)}
        return {
            "stored": reply.stored,
            "repeated": reply.repeated,
            "refused": [list(r) for r in reply.refused],
            "ended": reply.ended,
        }

    def _commit(self, caller: Caller, body: dict[str, Any], now: float) -> Any:
        self._index.check_planned(body["put_id"])
        schema = {body["column"]: {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}}
        for partition, slots in body["partitions"]:
            if not self.update_production_status(partition, slots, schema):
                raise BusUnavailable(f"TransferQueue did not record production of {len(slots)} rows in {partition}")
        return self._index.commit_put(caller, body["put_id"], now)

    def _allocate(self, partition: str) -> int:
        self._end_quarantine(self._now())
        if partition not in self.partitions:
            self.create_partition(partition)
        slots = self.index_manager
        slot: int
        if slots.reusable_indexes:
            # From the end: TransferQueue takes from the front, and so moves all that were ever freed for each row.
            slot = slots.reusable_indexes.pop()
            slots.partition_to_indexes[partition].add(slot)
        else:
            slot = slots.allocate_indexes(partition, 1)[0]
        # A partition's table has a line for each slot up to its highest, and grows by a copy: not for every put.
        if slot >= self.partitions[partition].allocated_samples_num:
            self.partitions[partition].ensure_samples_capacity(1 << slot.bit_length())
        return slot

    async def _sweep(self) -> None:
        """Free the storage rows of ended groups; their room returns once the stores confirm."""
        while True:
            with self._lock:
                garbage = self._index.take_garbage()
            if not garbage:
                return
            slots = [row.slot for row in garbage]
            await asyncio.gather(*(store.call.remote("free", slots) for store in self._stores))
            self._run(lambda now, garbage=garbage: self._freed(garbage, now))  # type: ignore[misc]

    def _freed(self, garbage: list[Garbage], now: float) -> None:
        for partition, rows in groupby(sorted(garbage, key=lambda r: r.partition), key=lambda r: r.partition):
            slots = [row.slot for row in rows]
            self.partitions[partition].clear_data(slots)
            self._quarantine.append((now + QUARANTINE_S, partition, slots))
        self._index.freed(garbage)
        self._empty_partitions.update(self._index.take_empty_partitions())

    def _end_quarantine(self, now: float) -> None:
        while self._quarantine and self._quarantine[0][0] <= now:
            _, partition, slots = self._quarantine.popleft()
            # A notice that came after the rows were freed may have marked them again.
            self.partitions[partition].clear_data(slots)
            self.index_manager.release_indexes(partition, slots)
            if partition in self._empty_partitions and not any(p == partition for _, p, _ in self._quarantine):
                self._empty_partitions.discard(partition)
                self.clear_partition(partition)

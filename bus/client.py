"""The clients of the bus: `BusClient` for asyncio services, `SyncBusClient` for threads.

Both are thin faces of one core that lives on an event loop in a thread of its own: packing,
digests and TransferQueue's sockets stay off the caller's loop. Every call has a deadline and may
be repeated: puts are first-write-wins, leases carry their id.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from bus.core import Core
from bus.errors import BusTimeout
from bus.records import (
    AckResult,
    AdmitResult,
    BusAddress,
    BusStats,
    Caller,
    Closed,
    Empty,
    Event,
    GroupAdmission,
    Lease,
    LeaseRequest,
    PutResult,
    Rollback,
    RowPut,
    Tags,
    TrainedStep,
    Verdict,
)
from relax.config.run import BusConfig
from relax.types import PolicyVersion

T = TypeVar("T")

_SLACK_S = 2.0
"""The core keeps the deadline; a caller waits this much longer before it gives the core up."""


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await on the caller's loop what runs on this one. A cancelled caller cancels it."""
        result: T = await asyncio.wrap_future(self.submit(coroutine))
        return result

    def block(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        future = self.submit(coroutine)
        try:
            result: T = future.result(None if timeout_s is None else timeout_s + _SLACK_S)
        except TimeoutError as error:
            future.cancel()
            raise BusTimeout(f"no answer within {timeout_s} s") from error
        return result

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=_SLACK_S)


class BusClient:
    """Asynchronous face. Make it with `connect`; end it with `close`."""

    def __init__(self, loop: _Loop, core: Core) -> None:
        self._loop = loop
        self._core = core

    @classmethod
    async def connect(
        cls, address: BusAddress, *, owner: str, role: str, config: BusConfig, deadline_s: float, rows: bool = True
    ) -> BusClient:
        """Attach to a running bus (never starts one) as a new incarnation of `owner`.

        rows=False: for calls without rows (statistics, closing topics), which needs no TransferQueue.
        Leases of an older incarnation end, and its writes are refused from now on. Raises
        BusUnavailable when there is no bus within the deadline.
        """
        loop = _Loop(f"bus-{owner}")
        try:
            return cls(loop, await loop.run(Core.connect(address, owner, role, config, rows, deadline_s)))
        except BaseException:
            loop.stop()
            raise

    @property
    def caller(self) -> Caller:
        """Owner, incarnation and epoch of this client."""
        return self._core.caller

    def on_stored(self, call: Callable[[], None]) -> None:
        """`call` in each put, on the client's own thread, when its bytes are stored and nothing of it is visible."""
        self._core.on_stored = call

    async def reattach(self, lost: Caller, *, deadline_s: float) -> None:
        """After BusUnavailable: attach to the bus that took the place of the one where we were `lost`.

        Calls of several tasks attach once. Leases of before are void. Raises BusUnavailable when there is no bus
        within the deadline.
        """
        await self._loop.run(self._core.reattach(lost, deadline_s))

    async def admit(self, groups: Sequence[GroupAdmission], deadline_s: float) -> AdmitResult:
        """Put prompt groups. Idempotent by (group_id, attempt); a higher attempt re-admits.

        Waits for room; raises BusFull at the deadline, GroupTooLarge when there can never be room.
        """
        return await self._loop.run(self._core.admit(groups, deadline_s))

    async def put(
        self, rows: Sequence[RowPut], *, lease_id: str | None, deadline_s: float, ack: bool = False
    ) -> PutResult:
        """Put fields of rows: visible when this returns. First write wins per (row, field).

        ack: in the same commit, acknowledge the lease's items of these rows that miss nothing more
        (for rollout: groups whose members all have a row or a tombstone). It saves the call of `ack`,
        which then answers at once.

        Raises SchemaError before anything is sent, LeaseLost or Fenced when the right to write is
        gone, BusFull (without a lease only), BusTimeout, BusUnavailable.
        """
        return await self._loop.run(self._core.put(rows, lease_id, ack, deadline_s))

    async def tombstone(self, group_id: str, k: int, reason: str, *, lease_id: str | None) -> bool:
        """Member k ends without a (further) row. False if it had ended already."""
        return await self._loop.run(self._core.ask(bool, "tombstone", group_id, k, reason, lease_id))

    async def lease(self, request: LeaseRequest, *, wait_s: float, keep: bool = False) -> Lease | Empty | Closed:
        """Take a batch, waiting up to `wait_s`. keep: extend it in the background until it ends."""
        return await self._loop.run(self._core.lease(request, wait_s, keep))

    async def extend(self, lease_id: str) -> float:
        """Renew the lease. Returns its time to live, s. LeaseLost if it is gone."""
        return await self._loop.run(self._core.ask(float, "extend", lease_id))

    async def ack(self, lease_id: str, row_ids: Sequence[str] | None = None, tags: Tags | None = None) -> AckResult:
        """End the lease, or items of it, well: row ids for reward and ref, group ids else.

        The actor passes its step in the tag `step`: that is when its groups count as trained.
        """
        return await self._loop.run(self._core.ack(lease_id, row_ids, tags))

    async def commit_step(self, trained: TrainedStep, lease_ids: Sequence[str]) -> AckResult:
        """A step that was taken: its groups count as trained, its version is the newest, all at once.

        `lease_ids`: what held its groups; they end, and one that has expired is no error. BusError, and nothing
        changes, when the version fell or the step was committed before.
        """
        return await self._loop.run(self._core.commit_step(trained, lease_ids))

    async def release(self, lease_id: str, reason: str, row_ids: Sequence[str] | None = None) -> int:
        """Hand the lease back. Any reason but DRAIN counts as one delivery of its items."""
        return await self._loop.run(self._core.release(lease_id, reason, row_ids))

    @asynccontextmanager
    async def leased(self, request: LeaseRequest, wait_s: float) -> AsyncIterator[Lease | Empty | Closed]:
        """A lease that is extended meanwhile, acknowledged on a clean exit, released on an exception."""
        reply = await self.lease(request, wait_s=wait_s, keep=True)
        if not isinstance(reply, Lease):
            yield reply
            return
        try:
            yield reply
        except BaseException as error:
            await self._loop.run(self._core.give_up(reply.lease_id, type(error).__name__))
            raise
        await self.ack(reply.lease_id)

    async def judge(self, verdicts: Sequence[Verdict], *, caller: Caller | None = None) -> int:
        """Verdicts over complete groups. Returns how many changed something. `caller`: see `events`."""
        return await self._loop.run(self._core.ask(int, "judge", tuple(verdicts), caller=caller))

    async def drop(self, group_id: str, reason: str) -> bool:
        """End a group untrained. False if it has ended, or the Actor holds it."""
        return await self._loop.run(self._core.ask(bool, "drop", group_id, reason))

    async def events(self, after: int, *, wait_s: float, caller: Caller | None = None) -> list[Event]:
        """Events with seq > after, waiting for the first. Acknowledges those up to `after`.

        `caller`: whom `after` was told. Raises StaleEpoch when we are attached to another bus by now.
        """
        return await self._loop.run(self._core.events(after, wait_s, caller))

    async def seed(self, fates: Mapping[str, int], through_step: int, lineage: int) -> bool:
        """What the ledger knows of earlier epochs: train samples by fate, the newest trained step, its lineage.

        False when this epoch was told before.
        """
        return await self._loop.run(self._core.ask(bool, "seed", dict(fates), through_step, lineage))

    async def recommit(self, steps: Sequence[TrainedStep], *, wait_s: float) -> int:
        """Steps taken before this epoch, oldest first: those that the ledger did not know count as trained now.

        Waits for `seed`; BusTimeout after `wait_s`. Returns how many were new.
        """
        return await self._loop.run(self._core.recommit(steps, wait_s))

    async def close_topic(self, topic: str) -> None:
        """No more admissions (`prompts`), none for training (`training`), or no more rows (`samples`).

        Once drained, leases answer Closed.
        """
        await self._loop.run(self._core.ask(type(None), "close_topic", topic))

    async def set_version(self, version: PolicyVersion, of_step: int, step: int) -> None:
        """The newest published version, the step that published it, and the newest trained step. Versions only grow."""
        await self._loop.run(self._core.ask(type(None), "set_version", version, of_step, step))

    async def gc(self, through_step: int) -> int:
        """Free the groups trained in steps <= through_step. Returns the rows freed."""
        return await self._loop.run(self._core.ask(int, "gc", through_step))

    async def collect_eval(self, group_ids: Sequence[str]) -> int:
        """Free eval groups that were read. Returns the rows freed."""
        return await self._loop.run(self._core.ask(int, "collect_eval", tuple(group_ids)))

    async def rollback(self, to: Rollback) -> bool:
        """Queue the groups trained after `to.to_step` again, in their order, once per lineage.

        False when their rows are gone: only an empty bus, filled from the ledger, can go on then.
        """
        return await self._loop.run(self._core.ask(bool, "rollback", to))

    async def open_groups(self) -> dict[str, bool]:
        """The training groups that have not ended, and whether all their members are terminal."""
        return await self._loop.run(self._core.ask(dict, "open_groups"))

    async def stats(self) -> BusStats:
        """One atomic snapshot."""
        return await self._loop.run(self._core.stats())

    async def ping(self) -> str:
        """The epoch, once engine and storage have answered. BusTimeout, or BusUnavailable when one of them is gone."""
        return await self._loop.run(self._core.ping())

    async def close(self) -> None:
        """Stop extending leases and detach. Leases held expire, or go to the next incarnation."""
        await self._loop.run(self._core.close())
        await asyncio.to_thread(self._loop.stop)


class SyncBusClient:
    """Blocking face, for a training thread. The same calls with the same meaning as `BusClient`."""

    def __init__(self, loop: _Loop, core: Core) -> None:
        self._loop = loop
        self._core = core

    @classmethod
    def connect(
        cls, address: BusAddress, *, owner: str, role: str, config: BusConfig, deadline_s: float
    ) -> SyncBusClient:
        loop = _Loop(f"bus-{owner}")
        try:
            return cls(loop, loop.block(Core.connect(address, owner, role, config, True, deadline_s), deadline_s))
        except BaseException:
            loop.stop()
            raise

    @property
    def caller(self) -> Caller:
        return self._core.caller

    def reattach(self, lost: Caller, *, deadline_s: float) -> None:
        self._loop.block(self._core.reattach(lost, deadline_s), deadline_s)

    def _call(self, coroutine: Coroutine[Any, Any, T], more_s: float = 0.0) -> T:
        return self._loop.block(coroutine, self._core.rpc_timeout_s + more_s)

    def admit(self, groups: Sequence[GroupAdmission], deadline_s: float) -> AdmitResult:
        return self._call(self._core.admit(groups, deadline_s), deadline_s)

    def put(self, rows: Sequence[RowPut], *, lease_id: str | None, deadline_s: float, ack: bool = False) -> PutResult:
        return self._call(self._core.put(rows, lease_id, ack, deadline_s), deadline_s)

    def tombstone(self, group_id: str, k: int, reason: str, *, lease_id: str | None) -> bool:
        return self._call(self._core.ask(bool, "tombstone", group_id, k, reason, lease_id))

    def lease(self, request: LeaseRequest, *, wait_s: float, keep: bool = False) -> Lease | Empty | Closed:
        return self._call(self._core.lease(request, wait_s, keep), wait_s + self._core.rpc_timeout_s)

    def extend(self, lease_id: str) -> float:
        return self._call(self._core.ask(float, "extend", lease_id))

    def ack(self, lease_id: str, row_ids: Sequence[str] | None = None, tags: Tags | None = None) -> AckResult:
        return self._call(self._core.ack(lease_id, row_ids, tags))

    def commit_step(self, trained: TrainedStep, lease_ids: Sequence[str]) -> AckResult:
        return self._call(self._core.commit_step(trained, lease_ids))

    def release(self, lease_id: str, reason: str, row_ids: Sequence[str] | None = None) -> int:
        return self._call(self._core.release(lease_id, reason, row_ids))

    @contextmanager
    def leased(self, request: LeaseRequest, wait_s: float) -> Iterator[Lease | Empty | Closed]:
        reply = self.lease(request, wait_s=wait_s, keep=True)
        if not isinstance(reply, Lease):
            yield reply
            return
        try:
            yield reply
        except BaseException as error:
            self._call(self._core.give_up(reply.lease_id, type(error).__name__))
            raise
        self.ack(reply.lease_id)

    def judge(self, verdicts: Sequence[Verdict]) -> int:
        return self._call(self._core.ask(int, "judge", tuple(verdicts)))

    def drop(self, group_id: str, reason: str) -> bool:
        return self._call(self._core.ask(bool, "drop", group_id, reason))

    def events(self, after: int, *, wait_s: float) -> list[Event]:
        return self._call(self._core.events(after, wait_s, None), wait_s)

    def seed(self, fates: Mapping[str, int], through_step: int, lineage: int) -> bool:
        return self._call(self._core.ask(bool, "seed", dict(fates), through_step, lineage))

    def recommit(self, steps: Sequence[TrainedStep], *, wait_s: float) -> int:
        return self._call(self._core.recommit(steps, wait_s), wait_s)

    def close_topic(self, topic: str) -> None:
        self._call(self._core.ask(type(None), "close_topic", topic))

    def set_version(self, version: PolicyVersion, of_step: int, step: int) -> None:
        self._call(self._core.ask(type(None), "set_version", version, of_step, step))

    def gc(self, through_step: int) -> int:
        return self._call(self._core.ask(int, "gc", through_step))

    def collect_eval(self, group_ids: Sequence[str]) -> int:
        return self._call(self._core.ask(int, "collect_eval", tuple(group_ids)))

    def rollback(self, to: Rollback) -> bool:
        return self._call(self._core.ask(bool, "rollback", to))

    def open_groups(self) -> dict[str, bool]:
        return self._call(self._core.ask(dict, "open_groups"))

    def stats(self) -> BusStats:
        return self._call(self._core.stats())

    def close(self) -> None:
        self._call(self._core.close())
        self._loop.stop()

"""What a client does, on its own event loop: plan, write, commit; lease, read, verify; keep alive."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayError

from bus.codec import EncodedField, encode_field, pack, unpack
from bus.errors import BusError, BusFull, BusTimeout, BusUnavailable, CorruptRow, PutLost, error_named
from bus.records import (
    PROMPTS,
    SAMPLES,
    AckResult,
    AdmitHeader,
    AdmitResult,
    BlobRef,
    BusAddress,
    BusStats,
    Caller,
    Closed,
    Empty,
    Event,
    Grant,
    GroupAdmission,
    Lease,
    LeaseRequest,
    PutPlan,
    PutResult,
    Row,
    RowGrant,
    RowHeader,
    RowPut,
    Tags,
    TrainedStep,
)
from bus.schema import check_row, derived_tags
from bus.wire import pack_call, unpack_call
from relax.config.run import BusConfig

if TYPE_CHECKING:
    from bus.transport import BlobStore

T = TypeVar("T")

_ATTACH_RETRY_S = 0.2
_ENGINE_CHECK_S = 2.0
"""How long rows may be under way before the engine is asked whether it is still there."""


def _now() -> float:
    """Seconds on the running loop's clock: a simulated loop has a simulated one."""
    return asyncio.get_running_loop().time()


class Attachment:
    """To one bus, of one epoch: its engine, its storage where rows are moved, and who we are there.

    An operation of several calls makes them all through the same one, so it never mixes two buses.
    """

    def __init__(self, engine: Any, store: BlobStore | None, caller: Caller) -> None:
        self.engine, self.caller = engine, caller
        self._store = store
        self._transfers: set[asyncio.Task[Any]] = set()
        self._left = False

    @property
    def moves_rows(self) -> bool:
        return self._store is not None

    @property
    def store(self) -> BlobStore:
        if self._store is None:
            raise BusError(f"{self.caller.owner} is connected for calls only: connect with rows=True to move rows")
        return self._store

    async def transfer(self, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Await what uses the sockets of `store`. Raises BusTimeout, and BusUnavailable when this bus is gone.

        A dead storage process does not answer, and says nothing: its engine is asked, which goes with it.
        """
        if self._left:
            work.close()
            raise BusUnavailable(f"{what} begun at a bus that was left")
        deadline = _now() + timeout_s
        task = asyncio.get_running_loop().create_task(work)
        self._transfers.add(task)
        task.add_done_callback(self._transfers.discard)
        try:
            while True:
                left = deadline - _now()
                await asyncio.wait([task], timeout=max(0.0, min(left, _ENGINE_CHECK_S)))
                if task.cancelled():
                    raise BusUnavailable(f"{what} was cut off: the bus is another one by now")
                if task.done():
                    return task.result()
                if left <= 0:
                    raise BusTimeout(f"{what} took longer than {timeout_s:.1f} s")
                with contextlib.suppress(BusTimeout):
                    await _ask(self.engine, "endpoints", timeout_s=min(left, _ENGINE_CHECK_S))
        finally:
            task.cancel()

    async def leave(self) -> None:
        """End what is under way here and close the sockets; they belong to the loop until nothing uses them."""
        self._left = True
        for task in self._transfers:
            task.cancel()
        if self._transfers:
            await asyncio.wait(list(self._transfers))
        if self._store is not None:
            await asyncio.to_thread(self._store.close)


class Core:
    """One attached client. Its methods run on the loop that `connect` ran on."""

    def __init__(self, address: BusAddress, role: str, config: BusConfig, at: Attachment) -> None:
        self._address, self._role = address, role
        self._at = at
        self.rpc_timeout_s = config.rpc_timeout_s
        self.on_stored: Callable[[], None] = lambda: None
        """Called when the bytes of a put lie in the storage and nothing of it is visible."""
        self._attaching = asyncio.Lock()
        self._kept: dict[str, asyncio.Task[None]] = {}
        self._ended: set[str] = set()
        self._farewells: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls, address: BusAddress, owner: str, role: str, config: BusConfig, rows: bool, deadline_s: float
    ) -> Core:
        return cls(address, role, config, await _attach(address, f"{role}:{owner}", rows, deadline_s))

    async def reattach(self, lost: Caller, deadline_s: float) -> None:
        """Attach to the bus that took the place of the one that `lost` was registered with.

        Nothing to do when another call has done so. What was leased is void. Raises BusUnavailable when there is no
        bus within the deadline.
        """
        async with self._attaching:
            if self.caller != lost:
                return
            gone = self._at
            self._at = await self._attach(lost.owner, gone.moves_rows, deadline_s)
            for lease_id in list(self._kept):
                self._unkeep(lease_id)
            self._ended.clear()
            await gone.leave()

    async def _attach(self, owner: str, rows: bool, deadline_s: float) -> Attachment:
        return await _attach(self._address, owner, rows, deadline_s)

    @property
    def caller(self) -> Caller:
        return self._at.caller

    async def ask(
        self, kind: type[T], method: str, *arguments: Any, more_s: float = 0.0, caller: Caller | None = None
    ) -> T:
        """One call to the engine that answers with a `kind`. Raises as `call` does."""
        reply = await self.call(method, *arguments, more_s=more_s, caller=caller)
        if not isinstance(reply, kind):
            raise BusError(f"{method} answered with {type(reply).__name__}, not {kind.__name__}")
        return reply

    async def call(self, method: str, *arguments: Any, more_s: float = 0.0, caller: Caller | None = None) -> Any:
        """One call to the engine, as `caller` if given: refused when the bus is another one by now.

        Raises the BusError it answers with, BusTimeout, BusUnavailable.
        """
        packed = pack_call((caller or self.caller, *arguments))
        reply = await _answer(lambda: self._at.engine.ask.remote(method, packed), self.rpc_timeout_s + more_s)
        return _value(unpack_call(reply))

    async def stats(self) -> BusStats:
        stats: BusStats = await _ask(self._at.engine, "stats", timeout_s=self.rpc_timeout_s)
        return stats

    async def ping(self) -> str:
        return str(await _ask(self._at.engine, "ping", timeout_s=self.rpc_timeout_s))

    async def close(self) -> None:
        for lease_id in list(self._kept):
            self._unkeep(lease_id)
        if self._farewells:
            await asyncio.wait(self._farewells, timeout=self.rpc_timeout_s)
        await self._at.leave()

    # -- writing -----------------------------------------------------------------------------

    async def admit(self, groups: Sequence[GroupAdmission], deadline_s: float) -> AdmitResult:
        headers, encoded = [], {}
        for group in groups:
            fields = [encode_field(group.group_id, "prompt", group.prompt)]
            encoded[group.group_id] = fields
            admission = AdmitHeader(
                group.group_id,
                group.seq,
                group.group_size,
                group.min_version,
                group.purpose.value,
                group.attempt,
                dict(group.tags),
                group.accept_rows,
            )
            check_row(group.group_id, PROMPTS, {"prompt": group.prompt})
            headers.append(_header(group.group_id, group.group_id, fields, {}, admission))
        result = await self._write(headers, encoded, None, False, deadline_s)
        return AdmitResult(result.stored, result.repeated, result.refused)

    async def put(self, rows: Sequence[RowPut], lease_id: str | None, ack: bool, deadline_s: float) -> PutResult:
        if ack and lease_id is None:
            raise BusError("a put without a lease has nothing to acknowledge")
        headers, encoded = [], {}
        for row in rows:
            checked = check_row(row.row_id, SAMPLES, row.fields)
            fields = [encode_field(row.row_id, name, value) for name, value in checked.items()]
            encoded[row.row_id] = fields
            tags = {**derived_tags(checked), **row.tags}
            headers.append(_header(row.row_id, row.group_id, fields, tags, None))
        result = await self._write(headers, encoded, lease_id, ack, deadline_s)
        if result.ended and lease_id is not None:
            self._unkeep(lease_id)
            self._ended.add(lease_id)
        return result

    async def _write(
        self,
        headers: list[RowHeader],
        encoded: dict[str, list[EncodedField]],
        lease_id: str | None,
        ack: bool,
        deadline_s: float,
    ) -> PutResult:
        """Plan, store, commit, all in one bus. Planned anew when the plan or the commit's answer is lost."""
        at = self._at
        deadline = _now() + deadline_s
        while True:
            left = deadline - _now()
            if left <= 0:
                raise BusTimeout(f"put of {len(headers)} rows not committed within {deadline_s} s")
            put_id = uuid.uuid4().hex
            plan = await self.call(
                "plan_put", put_id, tuple(headers), lease_id, ack, left, more_s=left, caller=at.caller
            )
            if isinstance(plan, Empty):
                raise BusFull(f"no room for {len(headers)} rows within {deadline_s} s")
            if not plan.rows:
                return PutResult(0, plan.repeated, plan.refused, plan.ended)
            try:
                return await self._store_and_commit(at, plan, encoded, deadline)
            except PutLost:
                continue

    async def _store_and_commit(
        self, at: Attachment, plan: PutPlan, encoded: dict[str, list[EncodedField]], deadline: float
    ) -> PutResult:
        blobs = []
        for row in plan.rows:
            fields = [field for field in encoded[row.row_id] if field.name in row.fields]
            blobs.append(pack(row.row_id, fields))
        write = at.store.write(plan.column, [row.slot for row in plan.rows], blobs)
        await at.transfer(write, deadline - _now(), "writing to the storage")
        self.on_stored()
        partitions: dict[str, list[int]] = {}
        for row in plan.rows:
            partitions.setdefault(row.partition, []).append(row.slot)
        body = {
            "put_id": plan.put_id,
            "caller": [at.caller.owner, at.caller.incarnation, at.caller.epoch],
            "column": plan.column,
            "partitions": [[name, slots] for name, slots in partitions.items()],
        }
        timeout_s = min(self.rpc_timeout_s, deadline - _now())
        try:
            answer = await at.transfer(at.store.commit(body), timeout_s, "the commit")
        except BusTimeout as error:
            # The commit may have happened: planned anew, its fields then count as repeated.
            raise PutLost(str(error)) from error
        if "error" in answer:
            raise error_named(answer["error"], answer["message"])
        refused = tuple((r[0], r[1]) for r in answer["refused"])
        return PutResult(answer["stored"], answer["repeated"], refused, answer["ended"])

    # -- leases ------------------------------------------------------------------------------

    async def lease(self, request: LeaseRequest, wait_s: float, keep: bool) -> Lease | Empty | Closed:
        if not request.lease_id:
            request = replace(request, lease_id=uuid.uuid4().hex)
        at = self._at
        try:
            reply = await self.call("lease", request, wait_s, more_s=wait_s, caller=at.caller)
            if not isinstance(reply, Grant):
                assert isinstance(reply, (Empty, Closed))
                return reply
            if keep:
                self._keep(reply.lease_id, reply.ttl_s)
            rows = await self._read(at, reply)
        except CorruptRow:
            await self.give_up(request.lease_id, "corrupt")
            raise
        except (asyncio.CancelledError, BusTimeout, BusUnavailable):
            self._withdraw(request.lease_id)
            raise
        return Lease(reply.lease_id, reply.task, reply.ttl_s, rows, reply.groups)

    def _withdraw(self, lease_id: str) -> None:
        """Tell the engine that nobody waits for this lease, without making the caller wait for that."""

        async def tell() -> None:
            with contextlib.suppress(BusError):
                await self.call("withdraw", lease_id)

        self._unkeep(lease_id)
        task = asyncio.get_running_loop().create_task(tell())
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def ack(self, lease_id: str, row_ids: Sequence[str] | None, tags: Tags | None) -> AckResult:
        if row_ids is None and lease_id in self._ended:  # by its last put
            self._ended.discard(lease_id)
            return AckResult(0)
        step = (tags or {}).get("step")
        items = None if row_ids is None else tuple(row_ids)
        result = await self.ask(AckResult, "ack", lease_id, items, None if step is None else int(step))
        if items is None:
            self._unkeep(lease_id)
        return result

    async def commit_step(self, trained: TrainedStep, lease_ids: Sequence[str]) -> AckResult:
        result = await self.ask(AckResult, "commit_step", trained)
        for lease_id in lease_ids:
            self._unkeep(lease_id)
        return result

    async def release(self, lease_id: str, reason: str, row_ids: Sequence[str] | None) -> int:
        if row_ids is None and lease_id in self._ended:  # nothing is left of it to hand back
            self._ended.discard(lease_id)
            return 0
        items = None if row_ids is None else tuple(row_ids)
        if items is None:
            self._unkeep(lease_id)
        return await self.ask(int, "release", lease_id, items, reason)

    async def give_up(self, lease_id: str, reason: str) -> None:
        """Release after a failure: that failure is the error to report, so one here is left to the expiry."""
        with contextlib.suppress(BusError):
            await self.release(lease_id, reason, None)

    async def recommit(self, steps: Sequence[TrainedStep], wait_s: float) -> int:
        reply = await self.call("recommit", tuple(steps), wait_s, more_s=wait_s)
        if isinstance(reply, Empty):
            raise BusTimeout(f"the ledger did not tell the new bus of earlier epochs within {wait_s} s")
        return int(reply)

    async def events(self, after: int, wait_s: float, caller: Caller | None) -> list[Event]:
        reply = await self.call("events", after, wait_s, more_s=wait_s, caller=caller)
        return [] if isinstance(reply, Empty) else list(reply)

    def _keep(self, lease_id: str, ttl_s: float) -> None:
        if lease_id not in self._kept:
            self._kept[lease_id] = asyncio.get_running_loop().create_task(self._heartbeat(lease_id, ttl_s))

    def _unkeep(self, lease_id: str) -> None:
        task = self._kept.pop(lease_id, None)
        if task is not None:
            task.cancel()

    async def _heartbeat(self, lease_id: str, ttl_s: float) -> None:
        """Extend until cancelled or lost. The holder learns of a loss at its next write or ack."""
        while True:
            await asyncio.sleep(ttl_s / 3)
            try:
                await self.call("extend", lease_id)
            except BusTimeout:
                continue
            except BusError:
                self._kept.pop(lease_id, None)
                return

    # -- reading -----------------------------------------------------------------------------

    async def _read(self, at: Attachment, grant: Grant) -> tuple[Row, ...]:
        """Fetch the blobs of a grant, few requests for many rows; verify row ids and digests."""
        columns_of: dict[int, set[str]] = {}
        for row in grant.rows:
            for ref in row.blobs:
                columns_of.setdefault(ref.slot, set()).add(ref.column)
        slots_with: dict[tuple[str, ...], list[int]] = {}
        for slot, columns in columns_of.items():
            slots_with.setdefault(tuple(sorted(columns)), []).append(slot)
        blobs: dict[tuple[int, str], Any] = {}
        for columns_tuple, slots in slots_with.items():
            read = at.store.read(columns_tuple, slots)
            blobs |= await at.transfer(read, self.rpc_timeout_s, "reading from the storage")
        unpacked: dict[BlobRef, dict[str, Any]] = {}  # the rows of a group share their prompt
        return tuple(_row(row, blobs, unpacked) for row in grant.rows)


async def _attach(address: BusAddress, owner: str, rows: bool, deadline_s: float) -> Attachment:
    """As a new incarnation of `owner`. An engine that dies meanwhile is looked for again until the deadline."""
    deadline = _now() + deadline_s
    while True:
        engine = await _find(address, deadline)
        try:
            return await _attach_to(engine, owner, rows, deadline)
        except BusUnavailable:
            if _now() + _ATTACH_RETRY_S > deadline:
                raise
        await asyncio.sleep(_ATTACH_RETRY_S)


async def _attach_to(engine: Any, owner: str, rows: bool, deadline: float) -> Attachment:
    caller: Caller = await _ask(engine, "register", owner, timeout_s=deadline - _now())
    if not rows:
        return Attachment(engine, None, caller)
    # TransferQueue and torch, first and by our way of importing them: the endpoints are of their types.
    kind = await _bounded(asyncio.to_thread(_blob_store), deadline - _now(), "loading TransferQueue")
    endpoints = await _ask(engine, "endpoints", timeout_s=deadline - _now())
    attach = asyncio.to_thread(kind, *endpoints)
    store = await _bounded(attach, deadline - _now(), "attaching to the storage")
    return Attachment(engine, store, caller)


def _header(
    row_id: str, group_id: str, fields: list[EncodedField], tags: dict[str, Any], admission: AdmitHeader | None
) -> RowHeader:
    return RowHeader(row_id, group_id, tuple((f.name, f.digest, len(f.data)) for f in fields), tags, admission)


def _row(grant: RowGrant, blobs: dict[tuple[int, str], Any], unpacked: dict[BlobRef, dict[str, Any]]) -> Row:
    fields: dict[str, Any] = {}
    for ref in grant.blobs:
        if ref not in unpacked:
            unpacked[ref] = unpack(blobs[ref.slot, ref.column], ref.owner_row, dict(ref.fields))
        fields |= unpacked[ref]
    return Row(grant.row_id, grant.group_id, grant.k, grant.segment, fields, grant.tags)


def _blob_store() -> type[BlobStore]:
    from bus.transport import BlobStore

    return BlobStore


async def _find(address: BusAddress, deadline: float) -> Any:
    """The engine's handle. It may be a moment until a bus that is being created has its name."""
    while True:
        try:
            return await asyncio.to_thread(ray.get_actor, address.engine, namespace=address.namespace)
        except (ValueError, RayError) as error:
            if _now() + _ATTACH_RETRY_S > deadline:
                raise BusUnavailable(f"no bus {address.engine} in namespace {address.namespace}") from error
        await asyncio.sleep(_ATTACH_RETRY_S)


async def _ask(engine: Any, method: str, *arguments: Any, timeout_s: float) -> Any:
    return _value(await _answer(lambda: engine.call.remote(method, *arguments), timeout_s))


async def _answer(send: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
    try:
        return await asyncio.wait_for(send(), timeout_s)
    except TimeoutError as error:
        raise BusTimeout(f"the bus did not answer within {timeout_s:.1f} s") from error
    except RayError as error:
        raise BusUnavailable(f"the bus is gone: {error}") from error


def _value(answer: Any) -> Any:
    if isinstance(answer, BusError):
        raise answer
    return answer


async def _bounded(work: Awaitable[Any], timeout_s: float, what: str) -> Any:
    try:
        return await asyncio.wait_for(work, max(0.0, timeout_s))
    except TimeoutError as error:
        raise BusTimeout(f"{what} took longer than {timeout_s:.1f} s") from error

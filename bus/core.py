"""What a client does, on its own event loop: plan, write, commit; lease, read, verify; keep alive."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Sequence
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


Attached = tuple[Any, "BlobStore | None", Caller]
"""The engine's actor, the storage where rows are moved, and who we are there."""


class Core:
    """One attached client. Its methods run on the loop that `connect` ran on."""

    def __init__(self, address: BusAddress, role: str, config: BusConfig, attached: Attached) -> None:
        self._address, self._role = address, role
        self._engine, self._attached, self.caller = attached
        self.rpc_timeout_s = config.rpc_timeout_s
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
            rows, gone = self._attached is not None, self._attached
            self._engine, self._attached, self.caller = await _attach(self._address, lost.owner, rows, deadline_s)
            for lease_id in list(self._kept):
                self._unkeep(lease_id)
            self._ended.clear()
            if gone is not None:
                await asyncio.to_thread(gone.close)

    @property
    def _store(self) -> BlobStore:
        if self._attached is None:
            raise BusError(f"{self.caller.owner} is connected for calls only: connect with rows=True to move rows")
        return self._attached

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
        try:
            reply = self._engine.ask.remote(method, pack_call((caller or self.caller, *arguments)))
        except RayError as error:
            raise BusUnavailable(f"the bus is gone: {error}") from error
        return _value(unpack_call(await _answer(reply, self.rpc_timeout_s + more_s)))

    async def stats(self) -> BusStats:
        stats: BusStats = await _ask(self._engine.call.remote("stats"), self.rpc_timeout_s)
        return stats

    async def ping(self) -> str:
        return str(await _ask(self._engine.call.remote("ping"), self.rpc_timeout_s))

    async def close(self) -> None:
        for lease_id in list(self._kept):
            self._unkeep(lease_id)
        if self._farewells:
            await asyncio.wait(self._farewells, timeout=self.rpc_timeout_s)
        if self._attached is not None:
            await asyncio.to_thread(self._attached.close)

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
        """Plan, store, commit. Planned anew when the plan or the commit's answer is lost."""
        deadline = time.monotonic() + deadline_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise BusTimeout(f"put of {len(headers)} rows not committed within {deadline_s} s")
            put_id = uuid.uuid4().hex
            plan = await self.call("plan_put", put_id, tuple(headers), lease_id, ack, left, more_s=left)
            if isinstance(plan, Empty):
                raise BusFull(f"no room for {len(headers)} rows within {deadline_s} s")
            if not plan.rows:
                return PutResult(0, plan.repeated, plan.refused, plan.ended)
            try:
                return await self._store_and_commit(plan, encoded, deadline)
            except PutLost:
                continue

    async def _store_and_commit(
        self, plan: PutPlan, encoded: dict[str, list[EncodedField]], deadline: float
    ) -> PutResult:
        blobs = []
        for row in plan.rows:
            fields = [field for field in encoded[row.row_id] if field.name in row.fields]
            blobs.append(pack(row.row_id, fields))
        write = self._store.write(plan.column, [row.slot for row in plan.rows], blobs)
        await _bounded(write, deadline - time.monotonic(), "writing to the storage")
        partitions: dict[str, list[int]] = {}
        for row in plan.rows:
            partitions.setdefault(row.partition, []).append(row.slot)
        body = {
            "put_id": plan.put_id,
            "caller": [self.caller.owner, self.caller.incarnation, self.caller.epoch],
            "column": plan.column,
            "partitions": [[name, slots] for name, slots in partitions.items()],
        }
        timeout_s = min(self.rpc_timeout_s, deadline - time.monotonic())
        try:
            answer = await _bounded(self._store.commit(body), timeout_s, "the commit")
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
        try:
            reply = await self.call("lease", request, wait_s, more_s=wait_s)
            if not isinstance(reply, Grant):
                assert isinstance(reply, (Empty, Closed))
                return reply
            if keep:
                self._keep(reply.lease_id, reply.ttl_s)
            rows = await self._read(reply)
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

    async def commit_step(self, lease_ids: Sequence[str], version: int, step: int) -> AckResult:
        result = await self.ask(AckResult, "commit_step", tuple(lease_ids), version, step)
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

    async def rollback(self, to_step: int) -> tuple[str, ...]:
        group_ids: tuple[str, ...] = await self.call("rollback", to_step)
        return group_ids

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

    async def _read(self, grant: Grant) -> tuple[Row, ...]:
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
            read = self._store.read(columns_tuple, slots)
            blobs |= await _bounded(read, self.rpc_timeout_s, "reading from the storage")
        unpacked: dict[BlobRef, dict[str, Any]] = {}  # the rows of a group share their prompt
        return tuple(_row(row, blobs, unpacked) for row in grant.rows)


async def _attach(address: BusAddress, owner: str, rows: bool, deadline_s: float) -> Attached:
    """As a new incarnation of `owner`. An engine that dies meanwhile is looked for again until the deadline."""
    deadline = time.monotonic() + deadline_s
    while True:
        engine = await _find(address, deadline)
        try:
            return await _attach_to(engine, owner, rows, deadline)
        except BusUnavailable:
            if time.monotonic() + _ATTACH_RETRY_S > deadline:
                raise
        await asyncio.sleep(_ATTACH_RETRY_S)


async def _attach_to(engine: Any, owner: str, rows: bool, deadline: float) -> Attached:
    caller: Caller = await _ask(engine.call.remote("register", owner), deadline - time.monotonic())
    if not rows:
        return engine, None, caller
    # TransferQueue and torch, first and by our way of importing them: the endpoints are of their types.
    kind = await _bounded(asyncio.to_thread(_blob_store), deadline - time.monotonic(), "loading TransferQueue")
    endpoints = await _ask(engine.call.remote("endpoints"), deadline - time.monotonic())
    attach = asyncio.to_thread(kind, *endpoints)
    return engine, await _bounded(attach, deadline - time.monotonic(), "attaching to the storage"), caller


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
            if time.monotonic() + _ATTACH_RETRY_S > deadline:
                raise BusUnavailable(f"no bus {address.engine} in namespace {address.namespace}") from error
        await asyncio.sleep(_ATTACH_RETRY_S)


async def _ask(reply: Awaitable[Any], timeout_s: float) -> Any:
    return _value(await _answer(reply, timeout_s))


async def _answer(reply: Awaitable[Any], timeout_s: float) -> Any:
    try:
        return await asyncio.wait_for(reply, timeout_s)
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

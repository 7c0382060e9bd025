"""Putting rows: planned (where the bytes go, what is refused), then committed (visible).

First write wins per (row, field). Between plan and commit the client writes the bytes to the
storage; a plan that is never committed expires and leaves nothing visible.
"""

from __future__ import annotations

from collections.abc import Callable

from bus.errors import BusError, GroupTooLarge, LeaseLost, PutLost, SchemaError
from bus.index.groups import Groups
from bus.index.leases import Leases
from bus.index.partitions import Partitions
from bus.index.state import TRAINED, Garbage, Group, Member, Plan, PlannedFields, Row, State, StoredField
from bus.index.tasks import TaskQueues
from bus.records import (
    CLOSED,
    PROMPTS,
    SAMPLES,
    TRAINING,
    AdmitHeader,
    Caller,
    PlannedRow,
    PutPlan,
    PutResult,
    RowHeader,
)
from relax.types import Purpose

Allocate = Callable[[str], int]
"""Partition -> a free storage slot in it."""


class Puts:
    def __init__(self, state: State, groups: Groups, leases: Leases, queues: TaskQueues) -> None:
        self._s = state
        self._groups = groups
        self._leases = leases
        self._queues = queues
        self.partitions = Partitions(state.limits.partition_rows)

    # -- plan --------------------------------------------------------------------------------

    def plan(
        self,
        caller: Caller,
        put_id: str,
        headers: tuple[RowHeader, ...],
        lease_id: str | None,
        ack: bool,
        now: float,
        allocate: Allocate,
    ) -> PutPlan | None:
        """Where the new fields of these rows go. None when the budget has no room for them now.

        A put under a lease is never refused for lack of room: its worst case is reserved. One that
        was committed with `ack`, and whose answer was lost, finds its lease ended and its fields there.
        """
        known = self._s.plans.get(put_id)
        if known is not None:
            return self._reply(known)
        plan = Plan(put_id, caller.owner, caller.incarnation, lease_id, "", now + self._s.limits.plan_ttl_s, [])
        repeated = lease_id is not None and ack and self._leases.ended_well(caller, lease_id)
        if lease_id is not None and not repeated:
            items = self._leases.covers(caller, lease_id, headers)
            plan.ack = items if ack else ()
        wanted = [(header, self._new_fields(header, plan)) for header in headers]
        wanted = [(header, fields) for header, fields in wanted if fields]
        if repeated and wanted:
            raise LeaseLost(f"lease {lease_id} of {caller.owner} was acknowledged: nothing new may be put under it")
        if lease_id is None:
            plan.reserved_rows, plan.reserved_bytes = self._room_needed(wanted)
            if not self._has_room(plan, wanted):
                return None
            self._s.budget.reserve(plan.reserved_rows, plan.reserved_bytes)
        for header, fields in wanted:
            row = self._row_for(header, allocate)
            plan.rows.append(PlannedFields(row, fields, header.tags, header.admission))
        column = max((planned.row.next_column for planned in plan.rows), default=0)
        for planned in plan.rows:
            planned.row.next_column = column + 1
        plan.column = f"b{column}"
        self._count_refusals(plan)
        if plan.rows:
            self._s.plans[put_id] = plan
            return self._reply(plan)
        return self._reply(plan, ended=repeated or self._acknowledge(caller, plan))

    def _acknowledge(self, caller: Caller, plan: Plan) -> bool:
        """Whether the plan's lease has ended with it."""
        return bool(plan.ack) and self._leases.finish(caller, plan.lease_id or "", plan.ack)

    def _reply(self, plan: Plan, *, ended: bool = False) -> PutPlan:
        rows = tuple(
            PlannedRow(p.row.row_id, p.row.slot, p.row.partition, tuple(name for name, _, _ in p.fields))
            for p in plan.rows
        )
        return PutPlan(plan.put_id, plan.column, rows, plan.repeated, tuple(plan.refused), ended)

    def _new_fields(self, header: RowHeader, plan: Plan) -> tuple[tuple[str, bytes, int], ...]:
        """The fields that are not there yet; the others are noted as repeated or refused."""
        if header.admission is not None:
            return header.fields if self._is_new_group(header.admission, plan) else ()
        group = self._s.groups.get(header.group_id)
        if group is None or group.fate is not None or self._member_of(group, header).tombstone is not None:
            plan.refused.append((header.row_id, "terminal"))
            return ()
        row = self._s.rows.get(header.row_id)
        if row is None and SAMPLES in self._s.closed:
            plan.refused.append((header.row_id, CLOSED))
            return ()
        return self._first_writes(row, header.row_id, header.fields, plan)

    def _first_writes(
        self, row: Row | None, row_id: str, fields: tuple[tuple[str, bytes, int], ...], plan: Plan
    ) -> tuple[tuple[str, bytes, int], ...]:
        fresh = []
        for name, digest, size in fields:
            stored = None if row is None else row.fields.get(name)
            if stored is None:
                fresh.append((name, digest, size))
            elif stored.digest == digest:
                plan.repeated += 1
            else:
                plan.refused.append((row_id, "digest"))
        return tuple(fresh)

    def _is_new_group(self, spec: AdmitHeader, plan: Plan) -> bool:
        group = self._s.groups.get(spec.group_id)
        if group is None:
            if spec.group_id in self._s.trained_elsewhere:
                plan.refused.append((spec.group_id, TRAINED))
                return False
            if spec.attempt <= self._s.forgotten.get(spec.group_id, -1):
                plan.refused.append((spec.group_id, "terminal"))
                return False
            if PROMPTS in self._s.closed or (TRAINING in self._s.closed and spec.purpose == Purpose.TRAIN):
                plan.refused.append((spec.group_id, CLOSED))
                return False
            return True
        if group.fate is not None:
            plan.refused.append((spec.group_id, group.fate))
        elif spec.attempt <= group.spec.attempt:
            plan.repeated += 1
        else:
            self._leases.revoke_group(group)
            self._groups.reopen(group, spec)
            self._s.counters["readmitted"] += 1
        return False

    def _member_of(self, group: Group, header: RowHeader) -> Member:
        k = _index_in(header.row_id, header.group_id)[0]
        if k >= len(group.members):
            raise SchemaError(f"row {header.row_id}: group {header.group_id} has {len(group.members)} members")
        return group.members[k]

    # -- room --------------------------------------------------------------------------------

    def _room_needed(self, wanted: list[tuple[RowHeader, tuple[tuple[str, bytes, int], ...]]]) -> tuple[int, int]:
        rows = nbytes = 0
        for header, fields in wanted:
            size = sum(size for _, _, size in fields)
            row = self._s.rows.get(header.row_id)
            if row is not None and row.visible:
                nbytes += max(0, row.bytes + size - row.charge)
                continue
            rows += 1
            tokens = header.tags.get("tokens")
            worst = 0 if header.admission else self._s.limits.worst_bytes(None if tokens is None else int(tokens))
            nbytes += max(size, worst)
        return rows, nbytes

    def _has_room(self, plan: Plan, wanted: list[tuple[RowHeader, tuple[tuple[str, bytes, int], ...]]]) -> bool:
        """Prompts leave room for the largest group: else they could fill the bus and stop it."""
        admissions = [(header.admission, fields) for header, fields in wanted if header.admission is not None]
        if not admissions:
            return self._s.budget.fits(plan.reserved_rows, plan.reserved_bytes)
        limits = self._s.limits
        largest = max(self._s.largest_group, *(spec.group_size for spec, _ in admissions))
        for spec, fields in admissions:
            size = sum(size for _, _, size in fields)
            rows, nbytes = 1 + spec.group_size, size + spec.group_size * limits.worst_bytes()
            if rows > limits.max_rows or nbytes > limits.max_bytes:
                raise GroupTooLarge(
                    f"group {spec.group_id}: worst case {rows} rows, {nbytes} bytes; "
                    f"the bus holds {limits.max_rows} rows, {limits.max_bytes} bytes"
                )
        if (
            self._s.prompt_rows + plan.reserved_rows + largest > limits.max_rows
            or self._s.prompt_bytes + plan.reserved_bytes + largest * limits.worst_bytes() > limits.max_bytes
            or not self._s.budget.fits(plan.reserved_rows, plan.reserved_bytes)
        ):
            return False
        self._s.largest_group = largest
        self._s.prompt_rows += plan.reserved_rows
        self._s.prompt_bytes += plan.reserved_bytes
        return True

    def _row_for(self, header: RowHeader, allocate: Allocate) -> Row:
        row = self._s.rows.get(header.row_id)
        if row is not None:
            return row
        topic = SAMPLES if header.admission is None else PROMPTS
        partition = self.partitions.assign(topic)
        k, segment = (-1, -1) if header.admission else _index_in(header.row_id, header.group_id)
        row = Row(header.row_id, header.group_id, k, segment, allocate(partition), partition)
        if header.admission is None:
            self._s.rows[header.row_id] = row
            self._s.groups[header.group_id].members[k].rows[segment] = row
        return row

    # -- commit ------------------------------------------------------------------------------

    def commit(self, caller: Caller, put_id: str, now: float) -> PutResult:
        """Make the planned fields visible. PutLost when the plan is gone; LeaseLost with its lease."""
        plan = self._s.plans.pop(put_id, None)
        if plan is None:
            raise PutLost(f"put {put_id} has no plan")
        self._s.budget.reserve(-plan.reserved_rows, -plan.reserved_bytes)
        if plan.lease_id is not None:
            try:
                self._leases.owned(caller, plan.lease_id)
            except BusError:
                self._abandon(plan)
                raise
        stored = 0
        refused_before = len(plan.refused)
        touched: dict[str, Group] = {}
        for planned in plan.rows:
            stored += self._admit(planned, plan, now) if planned.admission else self._show(planned, plan, touched)
        for group in touched.values():  # once for each group, not for each of its rows
            self._groups.refresh(group)
        self._count_refusals(plan, refused_before)
        self._s.counters["puts"] += 1
        ended = self._acknowledge(caller, plan)
        return PutResult(stored, plan.repeated, tuple(plan.refused), ended)

    def _admit(self, planned: PlannedFields, plan: Plan, now: float) -> int:
        spec = planned.admission
        assert spec is not None
        row, size = planned.row, sum(size for _, _, size in planned.fields)
        if not self._is_new_group(spec, plan):  # any more: this may have changed since the plan
            self._discard_prompt(planned)
            return 0
        self._store(planned, planned.fields, plan.column)
        row.bytes = row.charge = size
        self._s.budget.use(1, size)
        self._s.rows[row.row_id] = row
        self._groups.open(spec, row, now)
        return 1

    def _show(self, planned: PlannedFields, plan: Plan, touched: dict[str, Group]) -> int:
        row = planned.row
        group = self._s.groups.get(row.group_id)
        if group is None or group.fate is not None or group.members[row.k].tombstone is not None:
            plan.refused.append((row.row_id, "terminal"))
            return 0
        fresh = self._first_writes(row, row.row_id, planned.fields, plan)
        if not fresh:
            return 0
        first = not row.visible
        self._store(planned, fresh, plan.column)
        self._groups.charge(group, row, sum(size for _, _, size in fresh), first)
        self._groups.produced(group, group.members[row.k])
        self._queues.offer_row(row)
        touched[row.group_id] = group
        return len(fresh)

    def _store(self, planned: PlannedFields, fields: tuple[tuple[str, bytes, int], ...], column: str) -> None:
        row = planned.row
        row.tags = {**planned.tags, **row.tags}
        for name, digest, _ in fields:
            row.fields[name] = StoredField(column, digest)

    def expire(self, now: float) -> None:
        """Forget plans whose writer never committed. They expire in the order they were made."""
        while self._s.plans:
            plan = next(iter(self._s.plans.values()))
            if plan.expires_at > now:
                return
            del self._s.plans[plan.put_id]
            self._s.budget.reserve(-plan.reserved_rows, -plan.reserved_bytes)
            self._abandon(plan)
            self._s.counters["plans_expired"] += 1

    def _abandon(self, plan: Plan) -> None:
        for planned in plan.rows:
            if planned.admission is not None:
                self._discard_prompt(planned)
        self._s.woken |= {"space", "rollout"}

    def _discard_prompt(self, planned: PlannedFields) -> None:
        row = planned.row
        self._s.prompt_rows -= 1
        self._s.prompt_bytes -= sum(size for _, _, size in planned.fields)
        self._s.garbage.append(Garbage(row.slot, row.partition, 0, 0))
        self._s.woken.add("collector")

    def _count_refusals(self, plan: Plan, start: int = 0) -> None:
        for _, reason in plan.refused[start:]:
            known = reason in ("digest", "terminal", CLOSED)
            self._s.counters[f"refused_{reason if known else 'settled'}"] += 1


def _index_in(row_id: str, group_id: str) -> tuple[int, int]:
    """(k, segment) of a sample row id; SchemaError unless it is `<group_id>/<k>/<segment>`."""
    owner, *numbers = row_id.split("/")
    if owner != group_id or len(numbers) != 2 or not all(n.isdecimal() for n in numbers):
        raise SchemaError(f"row id {row_id!r} is not {group_id}/<k>/<segment>")
    return int(numbers[0]), int(numbers[1])

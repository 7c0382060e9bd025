"""Owners, leases and selection: who holds what, until when, and who gets what next."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from bus.errors import BusError, Fenced, GroupTooLarge, IncompleteGroup, IncompleteRow, LeaseLost
from bus.index.groups import Groups
from bus.index.overdue import held_slots
from bus.index.state import TRAINED, Group, LeaseState, Row, State
from bus.index.tasks import TaskQueues, task_named
from bus.records import (
    DRAIN,
    PROMPTS,
    SAMPLES,
    TRAINING,
    AckResult,
    BlobRef,
    Caller,
    Closed,
    Empty,
    Grant,
    GroupInfo,
    LeaseRequest,
    RowGrant,
    RowHeader,
    TrainedStep,
)

STALE = "stale"
ACKNOWLEDGED_KEPT = 4096
"""A call is repeated within its deadline: far fewer leases than this end meanwhile."""


class Leases:
    def __init__(self, state: State, groups: Groups, queues: TaskQueues) -> None:
        self._s = state
        self._groups = groups
        self._queues = queues
        self._expiries: list[tuple[float, str]] = []

    # -- owners ------------------------------------------------------------------------------

    def register(self, owner: str) -> int:
        """A new incarnation of `owner`. Leases of the older ones end now."""
        incarnation = self._s.incarnations.get(owner, 0) + 1
        self._s.incarnations[owner] = incarnation
        for lease in [lease for lease in self._s.leases.values() if lease.owner == owner]:
            self._s.counters["revoked"] += 1
            self._end_all(lease)
        return incarnation

    def check(self, caller: Caller) -> None:
        current = self._s.incarnations.get(caller.owner)
        if current != caller.incarnation:
            self._s.counters["fenced"] += 1
            raise Fenced(f"{caller.owner} is at incarnation {current}, the call came from {caller.incarnation}")

    def owned(self, caller: Caller, lease_id: str) -> LeaseState:
        lease = self._s.leases.get(lease_id)
        if lease is None or (lease.owner, lease.incarnation) != (caller.owner, caller.incarnation):
            self._s.counters["leases_lost"] += 1
            raise LeaseLost(f"lease {lease_id} of {caller.owner} has expired, was revoked or ended")
        return lease

    def ended_well(self, caller: Caller, lease_id: str) -> bool:
        """Whether this lease of the caller was acknowledged to its last item, not long ago."""
        return self._s.acknowledged.get(lease_id) == (caller.owner, caller.incarnation)

    def covers(self, caller: Caller, lease_id: str, headers: Iterable[RowHeader]) -> tuple[str, ...]:
        """The items of these rows. LeaseLost unless the lease is the caller's; BusError if it lacks one."""
        lease = self.owned(caller, lease_id)
        by_row = task_named(lease.task).level == "row"
        items: dict[str, None] = {}
        for header in headers:
            item = header.row_id if by_row else header.group_id
            if item not in lease.items:
                raise BusError(f"lease {lease_id} ({lease.task}) does not cover row {header.row_id}")
            items[item] = None
        return tuple(items)

    # -- lease -------------------------------------------------------------------------------

    def lease(self, caller: Caller, request: LeaseRequest, now: float) -> Grant | Empty | Closed:
        held = self._s.leases.get(request.lease_id)
        if held is not None:
            return self._grant(self.owned(caller, request.lease_id))
        task = task_named(request.task)
        self._queues.open(request)
        ttl = self._s.limits.lease_ttl_s if request.ttl_s is None else request.ttl_s
        owner = caller.owner, caller.incarnation
        lease = LeaseState(request.lease_id, task.name, *owner, ttl, now + ttl, {}, request, now)
        take = {"prompt": self._take_prompts, "row": self._take_rows, "group": self._take_groups}[task.level]
        reason = take(lease, request)
        if lease.items:
            self._s.leases[lease.lease_id] = lease
            heapq.heappush(self._expiries, (lease.expires_at, lease.lease_id))
            return self._grant(lease)
        return Closed(task.name) if self._drained(task.name) else Empty(reason)

    def _take_prompts(self, lease: LeaseState, request: LeaseRequest) -> str:
        member_bytes = request.bytes_per_member or request.rows_per_member * self._s.limits.worst_bytes()
        while len(lease.items) < request.max_items:
            heads = [head for p in request.purposes if (head := self._queues.prompts[p].peek()) is not None]
            open_to = [g for g in heads if request.version is None or g.spec.min_version <= request.version]
            if not open_to:
                return "version" if heads else "none"
            group = min(open_to, key=lambda g: g.order)
            rows, nbytes = self._groups.needed(group, request.rows_per_member, member_bytes)
            if not self._s.budget.fits(rows, nbytes):
                if not lease.items and (rows >= self._s.limits.max_rows or nbytes >= self._s.limits.max_bytes):
                    raise GroupTooLarge(f"group {group.spec.group_id} needs {rows} rows, {nbytes} bytes: over budget")
                return "budget"
            self._queues.prompts[group.purpose].pop()
            self._groups.reserve(group, request.rows_per_member, member_bytes)
            group.rollout.lease_id = lease.lease_id
            group.rollout.deliveries += 1
            self._hold(lease, group, group.spec.group_id, group.rollout.deliveries)
        return "none"

    def _take_rows(self, lease: LeaseState, request: LeaseRequest) -> str:
        queue = self._queues.rows[request.task].ready
        while len(lease.items) < request.max_items and (row := queue.pop()) is not None:
            row.leases[request.task] = lease.lease_id
            row.deliveries[request.task] += 1
            self._hold(lease, self._s.groups[row.group_id], row.row_id, row.deliveries[request.task])
        return "none"

    def _take_groups(self, lease: LeaseState, request: LeaseRequest) -> str:
        """Oldest first. Groups past the lag bound are dropped; overdue ones keep their slots."""
        queue = self._queues.groups
        assert queue is not None
        slots, rows = request.slots_left, 0
        while len(lease.items) < request.max_items and (group := queue.peek()) is not None:
            if group.replay is None:
                if self._too_old(group, request):
                    self._groups.end(group, STALE)
                    continue
                if slots is not None and slots - self._held_for_overdue(group, request) < 1:
                    return "held"
            size = len(group.live_rows())
            if lease.items and request.max_rows is not None and rows + size > request.max_rows:
                break
            queue.pop()
            rows += size
            slots = None if slots is None else slots - 1
            self._groups.taken_by_actor(group)
            group.actor.lease_id = lease.lease_id
            group.actor.deliveries += 1
            self._hold(lease, group, group.spec.group_id, group.actor.deliveries)
        return "none"

    def _too_old(self, group: Group, request: LeaseRequest) -> bool:
        return request.max_token_lag is not None and self._s.lag(group.oldest_version()) > request.max_token_lag

    def _held_for_overdue(self, group: Group, request: LeaseRequest) -> int:
        per_step = request.groups_per_step or request.max_items
        return held_slots(self._s.waiting_by_version, group.spec.min_version, request.hold_below, per_step)

    def _hold(self, lease: LeaseState, group: Group, item: str, delivery: int) -> None:
        lease.items[item] = None
        group.holds += 1
        self._s.counters["leased"] += 1
        if delivery > 1:
            self._s.counters["redelivered"] += 1

    def _drained(self, task: str) -> bool:
        """Closed for good: nothing more is admitted and nothing that could become work is open."""
        closed = self._s.closed
        no_more_rows = PROMPTS in closed and (not self._s.unproduced or SAMPLES in closed)
        if task == "rollout":
            return PROMPTS in closed and not self._s.unproduced
        if task == "reward":
            return no_more_rows and not self._s.incomplete
        if not (no_more_rows or TRAINING in closed):
            return False
        if task == "actor":  # what it holds itself is no more to come: the last step may be a smaller one
            return all(self._s.groups[group_id].actor.lease_id is not None for group_id in self._s.open_train)
        return not self._s.open_train

    # -- grants ------------------------------------------------------------------------------

    def _grant(self, lease: LeaseState) -> Grant:
        level = task_named(lease.task).level
        rows: list[RowGrant] = []
        groups: dict[str, Group] = {}
        for item in lease.items:
            row = self._s.rows.get(item)
            group = self._s.groups.get(row.group_id if row else item)
            if group is None or group.freed:
                continue
            groups[group.spec.group_id] = group
            wanted = group.live_rows() if level == "group" else [row] if row else []
            rows += [self._row_grant(group, row, lease.request.fields) for row in wanted]
        return Grant(lease.lease_id, lease.task, lease.ttl_s, tuple(rows), tuple(map(_info, groups.values())))

    def _row_grant(self, group: Group, row: Row, fields: tuple[str, ...]) -> RowGrant:
        blobs: dict[tuple[int, str], list[tuple[str, bytes]]] = {}
        for name in fields:
            source = row if name in row.fields else group.prompt
            stored = source.fields.get(name)
            if stored is not None:
                blobs.setdefault((source.slot, stored.column), []).append((name, stored.digest))
        refs = tuple(
            BlobRef(slot, column, group.prompt.row_id if slot == group.prompt.slot else row.row_id, tuple(named))
            for (slot, column), named in blobs.items()
        )
        return RowGrant(row.row_id, row.group_id, row.k, row.segment, row.tags, refs)

    # -- end of leases -----------------------------------------------------------------------

    def extend(self, caller: Caller, lease_id: str, now: float) -> float:
        """Give the lease its time to live again. Returns it."""
        lease = self.owned(caller, lease_id)
        lease.expires_at = now + lease.ttl_s
        heapq.heappush(self._expiries, (lease.expires_at, lease_id))
        return lease.ttl_s

    def ack(self, caller: Caller, lease_id: str, items: tuple[str, ...] | None, step: int | None) -> AckResult:
        """End items well. For the actor this is the moment a group counts as trained in `step`."""
        if items is None and self.ended_well(caller, lease_id):
            return AckResult(0, (), self._s.budget.retained_over)
        lease = self.owned(caller, lease_id)
        chosen = self._chosen(lease, items)
        if lease.task == "actor" and step is None:
            raise BusError("the actor acknowledges with the tag `step`")
        if lease.task == "rollout":
            self._refuse_unfinished(chosen)
        else:
            self._refuse_unproduced(lease, chosen)
        void = []
        for item in chosen:
            if not self._finish(lease, item, step):
                void.append(item)
        self._s.counters["acked"] += len(chosen) - len(void)
        return AckResult(len(chosen) - len(void), tuple(void), self._s.budget.retained_over)

    def finish(self, caller: Caller, lease_id: str, items: tuple[str, ...]) -> bool:
        """End those of the items that need nothing more. True when the lease has ended with them."""
        lease = self.owned(caller, lease_id)
        if lease.task == "actor":
            raise BusError("the actor acknowledges a step, not a put")
        for item in items:
            group = self._locate(item)[1]
            if lease.task == "rollout" and group is not None and group.fate is None and group.missing:
                continue
            if self._unproduced(lease, item):
                continue
            if item in lease.items and self._finish(lease, item, None):
                self._s.counters["acked"] += 1
        return lease_id not in self._s.leases

    def ack_step(self, trained: TrainedStep) -> AckResult:
        """The groups of a step end as trained, whether their lease still runs or expired in a long step: it was taken.

        `void`: those that had ended otherwise meanwhile.
        """
        void = []
        for group_id in trained.groups:
            group = self._s.groups.get(group_id)
            if group is None or group.fate is not None:
                void.append(group_id)
                continue
            lease = self._s.leases.get(group.actor.lease_id or "")
            if lease is not None:
                self._finish(lease, group_id, trained.step, trained.version)
            else:
                self._groups.end(group, TRAINED, trained.step, version=trained.version)
        acked = len(trained.groups) - len(void)
        self._s.counters["acked"] += acked
        return AckResult(acked, tuple(void), self._s.budget.retained_over)

    def release(self, caller: Caller, lease_id: str, items: tuple[str, ...] | None, reason: str) -> int:
        """Hand items back. Returns how many. Other reasons than `drain` count as a delivery."""
        lease = self.owned(caller, lease_id)
        chosen = self._chosen(lease, items)
        self._s.counters[f"released_{'drain' if reason == DRAIN else 'failed'}"] += len(chosen)
        for item in chosen:
            self._give_back(lease, item, counts=reason != DRAIN)
        return len(chosen)

    def expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, lease_id = heapq.heappop(self._expiries)
            lease = self._s.leases.get(lease_id)
            if lease is not None and lease.expires_at == expires_at:
                self._s.counters["expired"] += 1
                self._end_all(lease)

    def next_expiry(self) -> float | None:
        return self._expiries[0][0] if self._expiries else None

    def revoke_group(self, group: Group) -> None:
        """Take a group out of its rollout lease: it is re-admitted."""
        lease = self._s.leases.get(group.rollout.lease_id or "")
        if lease is not None:
            self._give_back(lease, group.spec.group_id, counts=False)

    def _end_all(self, lease: LeaseState) -> None:
        for item in list(lease.items):
            self._give_back(lease, item, counts=True)

    def _chosen(self, lease: LeaseState, items: tuple[str, ...] | None) -> list[str]:
        return [item for item in lease.items if items is None or item in items]

    def _refuse_unfinished(self, group_ids: list[str]) -> None:
        for group_id in group_ids:
            group = self._s.groups.get(group_id)
            if group is not None and group.fate is None and group.missing:
                missing = [k for k, member in enumerate(group.members) if member.missing]
                raise IncompleteGroup(f"group {group_id}: members {missing} have neither a row nor a tombstone")

    def _refuse_unproduced(self, lease: LeaseState, items: list[str]) -> None:
        for item in items:
            if missing := self._unproduced(lease, item):
                raise IncompleteRow(f"row {item}: {lease.task} acknowledges it without {', '.join(missing)}")

    def _unproduced(self, lease: LeaseState, item: str) -> list[str]:
        """What the holder said it produces, and a row that is still wanted lacks: nobody else would be asked for it."""
        row, group = self._locate(item)
        if row is None or group is None or group.fate is not None or group.members[row.k].tombstone is not None:
            return []
        return [name for name in lease.request.produces if name not in row.fields]

    def _finish(self, lease: LeaseState, item: str, step: int | None, version: int | None = None) -> bool:
        row, group = self._locate(item)
        if row is not None and lease.task in row.leases:
            row.done.add(lease.task)
            del row.leases[lease.task]
        alive = group is not None and group.fate is None
        if group is not None and lease.task == "rollout":
            group.rollout.lease_id = None
        elif group is not None and alive and lease.task == "actor":
            self._groups.end(group, TRAINED, step, version=version)
            group.actor.lease_id = None
        self._detach(lease, item, group)
        return alive

    def _give_back(self, lease: LeaseState, item: str, *, counts: bool) -> None:
        row, group = self._locate(item)
        self._detach(lease, item, group, free=False)
        if group is None:
            return
        if row is not None and task_named(lease.task).level == "row":
            self._return_row(lease.task, group, row, counts)
        else:
            self._return_group(lease.task, group, counts)
        self._groups.free_if_unheld(group)

    def _return_row(self, task: str, group: Group, row: Row, counts: bool) -> None:
        row.leases.pop(task, None)
        row.deliveries[task] -= 0 if counts else 1
        if self._queues.rows[task].wants(row):
            if row.deliveries[task] >= self._s.limits.max_deliveries:
                self._groups.kill_row(group, row, task)
            else:
                self._queues.offer_row(row)

    def _return_group(self, task: str, group: Group, counts: bool) -> None:
        claim = group.rollout if task == "rollout" else group.actor
        claim.lease_id = None
        claim.deliveries -= 0 if counts else 1
        if group.fate is not None:
            return
        if task == "actor":
            self._groups.given_back_by_actor(group)
        if claim.deliveries >= self._s.limits.max_deliveries and (task == "actor" or group.missing):
            self._groups.kill_group(group, task)
        else:
            self._queues.offer_group(group)

    def _locate(self, item: str) -> tuple[Row | None, Group | None]:
        row = self._s.rows.get(item)
        return row, self._s.groups.get(item.split("/", 1)[0])

    def _detach(self, lease: LeaseState, item: str, group: Group | None, *, free: bool = True) -> None:
        del lease.items[item]
        if not lease.items:
            self._s.leases.pop(lease.lease_id, None)
            if free:
                self._remember(lease)
        if group is not None:
            group.holds -= 1
            if free:
                self._groups.free_if_unheld(group)

    def _remember(self, lease: LeaseState) -> None:
        acknowledged = self._s.acknowledged
        acknowledged[lease.lease_id] = (lease.owner, lease.incarnation)
        if len(acknowledged) > ACKNOWLEDGED_KEPT:
            del acknowledged[next(iter(acknowledged))]


def _info(group: Group) -> GroupInfo:
    spec = group.spec
    return GroupInfo(
        spec.group_id,
        spec.seq,
        spec.attempt,
        spec.group_size,
        spec.min_version,
        spec.purpose,
        spec.tags,
        tuple(k for k, member in enumerate(group.members) if not member.missing),
        {k: member.tombstone for k, member in enumerate(group.members) if member.tombstone is not None},
        sum(member.reserved_rows for member in group.members),
        sum(member.reserved_bytes for member in group.members),
    )

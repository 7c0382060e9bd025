"""The life of a group: admitted, produced, complete, judged, ended, freed.

Each transition keeps three things in step: the budget, the sets that tell whether a task can
still get work, and the ready queues. Accounts are derived from `Member.fate` (see stats.py).
"""

from __future__ import annotations

from collections import Counter, deque

from bus.errors import BusError
from bus.index.state import TRAINED, Garbage, Group, Member, Row, State
from bus.index.tasks import TaskQueues
from bus.records import (
    DEAD_LETTER,
    PROMPTS,
    AdmitHeader,
    Event,
    EventKind,
    MemberReport,
    Rollback,
    Scalar,
    Verdict,
    VerdictKind,
)
from relax.types import Purpose

FORGOTTEN_KEPT = 16_384
"""A call is repeated within its deadline: far fewer groups than this end meanwhile."""
EVENTS = "events"
SPACE = "space"


class Groups:
    def __init__(self, state: State, queues: TaskQueues) -> None:
        self._s = state
        self._queues = queues
        self._complete_fields = frozenset(state.limits.complete_fields)

    # -- admission ---------------------------------------------------------------------------

    def open(self, spec: AdmitHeader, prompt: Row, now: float) -> None:
        """Take a new group; its prompt row has just become visible."""
        group = Group(spec, prompt, now, [Member() for _ in range(spec.group_size)])
        self._s.groups[spec.group_id] = group
        self._s.unproduced.add(spec.group_id)
        self._s.incomplete.add(spec.group_id)
        if group.is_train:
            self._s.open_train.add(spec.group_id)
            self._s.waiting_by_version[spec.min_version] += 1
        self._queues.offer_group(group)

    def reopen(self, group: Group, spec: AdmitHeader) -> None:
        """A higher attempt: members without a row are to be generated again.

        The lease of the attempt before is dropped by the caller. seq and min_version stay.
        """
        group.spec = group.spec._replace(attempt=spec.attempt, tags={**group.spec.tags, **spec.tags})
        for member in group.members:
            if not member.visible and member.fate is None:
                member.tombstone = None
        if group.missing:
            self._s.unproduced.add(group.spec.group_id)
            self._s.incomplete.add(group.spec.group_id)
            group.complete = False
        group.rollout.deliveries = 0
        self._queues.offer_group(group)

    # -- reservations ------------------------------------------------------------------------

    def reserve(self, group: Group, rows_per_member: int, bytes_per_member: int) -> tuple[int, int]:
        """Reserve the worst case of the members still missing. Kept over redeliveries."""
        for member in group.members:
            if member.missing and not member.reserved_rows:
                member.reserved_rows, member.reserved_bytes = rows_per_member, bytes_per_member
                self._s.budget.reserve(rows_per_member, bytes_per_member)
        return sum(m.reserved_rows for m in group.members), sum(m.reserved_bytes for m in group.members)

    def needed(self, group: Group, rows_per_member: int, bytes_per_member: int) -> tuple[int, int]:
        """What `reserve` would add."""
        bare = sum(1 for member in group.members if member.missing and not member.reserved_rows)
        return bare * rows_per_member, bare * bytes_per_member

    def _unreserve(self, member: Member) -> None:
        if member.reserved_rows or member.reserved_bytes:
            self._s.budget.reserve(-member.reserved_rows, -member.reserved_bytes)
            member.reserved_rows = member.reserved_bytes = 0
            self._s.woken |= {SPACE, "rollout"}

    def charge(self, group: Group, row: Row, added: int, first: bool) -> None:
        """Account for bytes that became visible, out of the member's reservation where it has one."""
        row.bytes += added
        tokens = row.tags.get("tokens")
        worst = self._s.limits.worst_bytes(None if tokens is None else int(tokens))
        member = group.members[row.k]
        if first and member.reserved_rows:
            worst = min(worst, member.reserved_bytes)
        charge = max(row.bytes, worst if first else row.charge)
        grown = charge - row.charge
        rows = 1 if first else 0
        taken_rows, taken_bytes = min(rows, member.reserved_rows), min(grown, member.reserved_bytes)
        member.reserved_rows -= taken_rows
        member.reserved_bytes -= taken_bytes
        self._s.budget.reserve(-taken_rows, -taken_bytes)
        self._s.budget.use(rows, grown)
        if not self._s.budget.fits(0, 0):
            self._s.counters["overruns"] += 1
        row.charge = charge
        if member.produced:
            self._unreserve(member)

    # -- members -----------------------------------------------------------------------------

    def produced(self, group: Group, member: Member) -> None:
        """A row of the member became visible: count it once, by sample id."""
        if member.counted:
            return
        member.counted = True
        if group.is_train:
            self._s.produced += 1
        else:
            self._s.eval_produced += 1

    def tombstone(self, group: Group, k: int, reason: str) -> bool:
        """End member k without a (further) row. False if it, or its group, had ended already."""
        member = group.members[k]
        if group.fate is not None or member.tombstone is not None:
            return False
        member.tombstone = reason
        if member.visible:
            member.fate = reason
        self._unreserve(member)
        self._s.counters["tombstones"] += 1
        self.refresh(group)
        return True

    def kill_row(self, group: Group, row: Row, task: str) -> None:
        """Dead letter: the row was handed out too often."""
        self._s.counters["dead_letters"] += 1
        if self.tombstone(group, row.k, DEAD_LETTER):
            self.emit(EventKind.DEAD_ROW, group, row_id=row.row_id, reason=task)

    def kill_group(self, group: Group, task: str) -> None:
        """Dead letter of a group-level task: missing members for rollout, the whole for actor."""
        if task == "actor":
            self._s.counters["dead_letters"] += 1
            self.end(group, DEAD_LETTER)
            return
        for k, member in enumerate(group.members):
            if member.missing:
                self._s.counters["dead_letters"] += 1
                self.tombstone(group, k, DEAD_LETTER)
                self.emit(EventKind.DEAD_ROW, group, row_id=f"{group.spec.group_id}/{k}", reason=task)

    def refresh(self, group: Group) -> None:
        """After any change of a member: is the group produced, complete, ready for somebody?"""
        if group.fate is not None:
            return
        group_id = group.spec.group_id
        if not group.missing and group_id in self._s.unproduced:
            self._s.unproduced.discard(group_id)
            self._s.woken.add("rollout")
        if not group.complete and all(m.tombstone is not None or m.has(self._complete_fields) for m in group.members):
            group.complete = True
            self._s.incomplete.discard(group_id)
            self._s.woken.add("reward")
            self.emit(EventKind.COMPLETE, group, members=self._report(group))
        self._queues.offer_to_train(group)

    def _report(self, group: Group) -> tuple[MemberReport, ...]:
        reports = []
        for k, member in enumerate(group.members):
            tags: dict[str, Scalar] = {}
            for _, row in sorted(member.rows.items()):
                tags |= row.tags
            reports.append(MemberReport(k, member.tombstone, tags))
        return tuple(reports)

    # -- ends --------------------------------------------------------------------------------

    def judge(self, verdict: Verdict) -> bool:
        """Apply a verdict. False if the group is unknown, ended, or judged the same before."""
        group = self._s.groups.get(verdict.group_id)
        if group is None or group.fate is not None or group.verdict is verdict.kind:
            return False
        if verdict.kind is VerdictKind.ACCEPTED:
            group.verdict = verdict.kind
            self._queues.offer_group(group)
            return True
        ended = EventKind.FILTERED if verdict.kind is VerdictKind.FILTERED else EventKind.DROPPED
        return self.drop(verdict.group_id, verdict.reason or verdict.kind.value, ended)

    def drop(self, group_id: str, reason: str, kind: EventKind = EventKind.DROPPED) -> bool:
        """End a group untrained. False if it is unknown, ended, or held by the trainer (it wins)."""
        group = self._s.groups.get(group_id)
        if group is None or group.fate is not None or group.actor.lease_id is not None:
            return False
        if reason == TRAINED:
            raise BusError(f"{TRAINED!r} is not a reason to drop {group_id}")
        self.end(group, reason, kind=kind)
        return True

    def end(
        self,
        group: Group,
        fate: str,
        step: int | None = None,
        *,
        version: int | None = None,
        kind: EventKind = EventKind.DROPPED,
        elsewhere: int | None = None,
    ) -> None:
        """Terminal: every visible sample gets its fate, reservations return, rows become free.

        `step`, `version`: it was trained then, and its rows are retained; with `elsewhere` it was trained from so many
        samples of an earlier epoch, and what it has here is of no use. `kind`: of the event, if it was not trained.
        """
        group.fate, group.step = fate, step
        for member in group.members:
            self._unreserve(member)
            if member.counted and member.fate is None:
                member.fate = fate
        group.tally = Counter(m.fate for m in group.members if m.counted and m.fate is not None)
        if elsewhere is not None:
            self._s.produced += elsewhere - group.tally[fate]
            group.tally[fate] = elsewhere
        group_id = group.spec.group_id
        self._s.unproduced.discard(group_id)
        self._s.incomplete.discard(group_id)
        self._s.open_train.discard(group_id)
        if group.is_train and group.actor.lease_id is None:
            self._leave_waiting(group)
        self._s.woken |= {"rollout", "actor", SPACE, *self._queues.rows}
        if step is not None and elsewhere is None:
            if not group.retained:  # else it was trained before, and taken back
                group.retained = True
                self._retain(group)
            self._s.trained_in.setdefault(step, []).append(group_id)
        if step is None:
            self.emit(kind, group, reason=fate)
        else:
            self.emit(EventKind.TRAINED, group, step=step, version=self._s.version if version is None else version)
        self.free_if_unheld(group)

    def trained_elsewhere(self, group_id: str, samples: int, step: int, version: int) -> None:
        """A group that was trained from the rows of an earlier epoch: it ends here, or is not taken when it comes."""
        group = self._s.groups.get(group_id)
        if group is not None and group.fate is not None:
            return
        self._s.trained_elsewhere[group_id] = (step, samples)
        if group is not None:
            self.end(group, TRAINED, step, version=version, elsewhere=samples)
            return
        self._s.produced += samples
        self._s.settled[TRAINED] += samples
        self._s.event_seq += 1
        event = Event(
            self._s.event_seq,
            EventKind.TRAINED,
            group_id,
            Purpose.TRAIN,
            step=step,
            samples={TRAINED: samples},
            version=version,
        )
        self._s.events.append(event)
        self._s.woken.add(EVENTS)

    def taken_by_actor(self, group: Group) -> None:
        self._leave_waiting(group)

    def given_back_by_actor(self, group: Group) -> None:
        self._s.waiting_by_version[group.spec.min_version] += 1
        self._queues.offer_group(group)

    def _leave_waiting(self, group: Group) -> None:
        waiting = self._s.waiting_by_version
        waiting[group.spec.min_version] -= 1
        if not waiting[group.spec.min_version]:
            del waiting[group.spec.min_version]

    def _retain(self, group: Group) -> None:
        rows = [group.prompt, *group.sample_rows()]
        for row in rows:
            if row.visible:
                self._s.budget.use(0, row.bytes - row.charge)
                row.charge = row.bytes
        charged = [row for row in rows if row.visible]
        self._s.budget.retain(len(charged), sum(row.charge for row in charged))
        self._s.prompt_rows -= 1
        self._s.prompt_bytes -= group.prompt.charge

    def rollback(self, to: Rollback) -> bool:
        """Queue the groups trained after `to.to_step` again, before all others and in the order they were trained.

        Nothing changes, and the answer is False, when the rows of one of them are gone: they were collected, or were
        those of an earlier epoch. Else what the reader of events has not heard of those steps he never will.
        """
        again = [gid for step in sorted(self._s.trained_in) if step > to.to_step for gid in self._s.trained_in[step]]
        elsewhere = any(step > to.to_step for step, _ in self._s.trained_elsewhere.values())
        if self._s.collected_through > to.to_step or elsewhere or not set(to.group_ids) <= set(again):
            return False
        for place, group_id in enumerate(again):
            self._take_back(self._s.groups[group_id], place)
        for step in [step for step in self._s.trained_in if step > to.to_step]:
            del self._s.trained_in[step]
        unheard = [e for e in self._s.events if e.kind is not EventKind.TRAINED or (e.step or 0) <= to.to_step]
        self._s.events = deque(unheard)
        return True

    def _take_back(self, group: Group, place: int) -> None:
        """Its rows stay in the budget of the retained ones, so that the producers have their room."""
        group.fate = group.step = group.tally = None
        group.replay = place
        for member in group.members:
            if member.fate == TRAINED:
                member.fate = None
        self._s.open_train.add(group.spec.group_id)
        group.actor.deliveries = 0
        self.given_back_by_actor(group)

    # -- freeing -----------------------------------------------------------------------------

    def collect_trained(self, through_step: int) -> int:
        """Free the rows of groups trained in steps <= through_step. Returns the rows freed."""
        freed = 0
        self._s.collected_through = max(self._s.collected_through, through_step)
        for step in sorted(s for s in self._s.trained_in if s <= through_step):
            for group_id in self._s.trained_in.pop(step):
                freed += self._free(self._s.groups[group_id], retained=True)
        return freed

    def collect_eval(self, group_ids: tuple[str, ...]) -> int:
        """End eval groups that were read. Returns the rows freed."""
        before = len(self._s.garbage)
        for group_id in group_ids:
            group = self._s.groups.get(group_id)
            if group is not None and not group.is_train and group.fate is None:
                self.end(group, "evaluated")
        return len(self._s.garbage) - before

    def free_if_unheld(self, group: Group) -> None:
        """Rows of a group that ended, and waits for no checkpoint, go once no lease can be reading them."""
        kept = group.retained and group.step is not None
        if group.fate is not None and not kept and not group.holds and not group.freed:
            self._free(group, retained=group.retained)

    def _free(self, group: Group, *, retained: bool) -> int:
        """Hand the storage rows to the collector; the budget returns when it has freed them."""
        rows = [group.prompt, *group.sample_rows()]
        for row in rows:
            self._s.rows.pop(row.row_id, None)
            self._s.garbage.append(Garbage(row.slot, row.partition, int(row.visible), row.charge, retained))
        for member in group.members:
            member.rows = {}
        group.freed = True
        self._s.woken.add("collector")
        self._s.forgettable.append(group.spec.group_id)
        self.forget()
        return len(rows)

    def freed(self, garbage: list[Garbage]) -> None:
        """The storage gave these rows up: their room returns."""
        for row in garbage:
            self._s.budget.free(row.rows, row.bytes, retained=row.retained)
            if row.partition.startswith(PROMPTS) and row.rows and not row.retained:
                self._s.prompt_rows -= 1
                self._s.prompt_bytes -= row.bytes
        if garbage:
            self._s.woken |= {SPACE, "rollout"}

    def forget(self) -> None:
        """Drop freed groups whose last event the reader has acknowledged, keeping their sums."""
        queue = self._s.forgettable
        while queue:
            group = self._s.groups.get(queue[0])
            if group is not None:
                if group.last_event > self._s.events_acked:
                    return
                if group.is_train and group.tally is not None:
                    self._s.settled.update(group.tally)
                del self._s.groups[group.spec.group_id]
                self._remember(group)
            queue.popleft()

    def _remember(self, group: Group) -> None:
        forgotten = self._s.forgotten
        forgotten[group.spec.group_id] = group.spec.attempt
        if len(forgotten) > FORGOTTEN_KEPT:
            del forgotten[next(iter(forgotten))]

    # -- events ------------------------------------------------------------------------------

    def emit(
        self,
        kind: EventKind,
        group: Group,
        *,
        members: tuple[MemberReport, ...] = (),
        step: int | None = None,
        version: int | None = None,
        row_id: str | None = None,
        reason: str | None = None,
    ) -> None:
        self._s.event_seq += 1
        group.last_event = self._s.event_seq
        self._s.events.append(
            Event(
                self._s.event_seq,
                kind,
                group.spec.group_id,
                group.purpose,
                members,
                step,
                row_id,
                reason,
                dict(group.tally or {}),
                version,
            )
        )
        self._s.woken.add(EVENTS)

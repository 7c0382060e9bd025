"""The index of the bus: a pure state machine. No Ray, no TransferQueue, no clock, no threads.

It knows which fields of which rows are visible and who holds what; the bytes are elsewhere. Every
call takes `now` (seconds, monotonic). `woken` collects the tasks (and `events`, `space`,
`collector`) for which something changed, so that the host can wake those who wait.

    admit -> [prompt] -rollout lease-> plan, commit rows -> reward, ref leases -> judge
          -> actor lease -> ack: trained, retained -> gc
"""

from __future__ import annotations

from bus.errors import BusError, PutLost
from bus.index.budget import Budget
from bus.index.groups import Groups
from bus.index.leases import Leases
from bus.index.puts import Allocate, Puts
from bus.index.state import Garbage, Limits, State
from bus.index.stats import account, snapshot
from bus.index.tasks import TaskQueues
from bus.records import (
    PROMPTS,
    SAMPLES,
    TRAINING,
    Account,
    AckResult,
    BusStats,
    Caller,
    Closed,
    Empty,
    Event,
    Grant,
    LeaseRequest,
    PutPlan,
    PutResult,
    Rollback,
    RowHeader,
    TrainedStep,
    Verdict,
)

__all__ = ["Index", "Limits"]

EVENTS_PER_REPLY = 1000


class Index:
    def __init__(self, limits: Limits, epoch: str = "") -> None:
        self.epoch = epoch
        self.state = State(limits, Budget(limits.max_rows, limits.max_bytes, limits.retained_max_bytes))
        self._queues = TaskQueues(self.state)
        self._groups = Groups(self.state, self._queues)
        self._leases = Leases(self.state, self._groups, self._queues)
        self._puts = Puts(self.state, self._groups, self._leases, self._queues)

    def register(self, owner: str, now: float) -> Caller:
        """A new incarnation of `owner`: its older leases end, its older writes are refused."""
        self.tick(now)
        return Caller(owner, self._leases.register(owner), self.epoch)

    def tick(self, now: float) -> None:
        """Let leases and plans expire."""
        self._leases.expire(now)
        self._puts.expire(now)

    def next_expiry(self) -> float | None:
        """When `tick` next has work, at the earliest."""
        return self._leases.next_expiry()

    def _enter(self, caller: Caller, now: float) -> None:
        self.tick(now)
        self._leases.check(caller)

    # -- rows --------------------------------------------------------------------------------

    def plan_put(
        self,
        caller: Caller,
        put_id: str,
        rows: tuple[RowHeader, ...],
        lease_id: str | None,
        ack: bool,
        now: float,
        allocate: Allocate,
    ) -> PutPlan | None:
        """Where the bytes of these rows go; None while the budget has no room."""
        self._enter(caller, now)
        return self._puts.plan(caller, put_id, rows, lease_id, ack, now, allocate)

    def check_planned(self, put_id: str) -> None:
        """PutLost unless this put is planned: its storage rows are then still its own."""
        if put_id not in self.state.plans:
            raise PutLost(f"put {put_id} has no plan")

    def commit_put(self, caller: Caller, put_id: str, now: float) -> PutResult:
        """Make a planned put visible."""
        self._enter(caller, now)
        return self._puts.commit(caller, put_id, now)

    def tombstone(self, caller: Caller, group_id: str, k: int, reason: str, lease_id: str | None, now: float) -> bool:
        """Member k ends without a (further) row. False if it had ended already."""
        self._enter(caller, now)
        group = self.state.groups.get(group_id)
        if lease_id is not None:
            self._leases.owned(caller, lease_id)
        if group is None:
            return False
        if not 0 <= k < len(group.members):
            raise BusError(f"group {group_id} has no member {k}")
        return self._groups.tombstone(group, k, reason)

    # -- leases ------------------------------------------------------------------------------

    def lease(self, caller: Caller, request: LeaseRequest, now: float) -> Grant | Empty | Closed:
        self._enter(caller, now)
        return self._leases.lease(caller, request, now)

    def is_leased(self, lease_id: str) -> bool:
        return lease_id in self.state.leases

    def extend(self, caller: Caller, lease_id: str, now: float) -> float:
        self._enter(caller, now)
        return self._leases.extend(caller, lease_id, now)

    def ack(
        self, caller: Caller, lease_id: str, items: tuple[str, ...] | None, step: int | None, now: float
    ) -> AckResult:
        self._enter(caller, now)
        return self._leases.ack(caller, lease_id, items, step)

    def release(self, caller: Caller, lease_id: str, items: tuple[str, ...] | None, reason: str, now: float) -> int:
        self._enter(caller, now)
        return self._leases.release(caller, lease_id, items, reason)

    def commit_step(self, caller: Caller, trained: TrainedStep, now: float) -> AckResult:
        """A step that was taken: its groups count as trained and its version is the newest, at once or not at all.

        The same call again, because its answer was lost, gets the same answer. BusError for a version that fell, or a
        step that does not follow the newest one.
        """
        self._enter(caller, now)
        call = (caller, trained)
        if self.state.committed is not None and self.state.committed[0] == call:
            return self.state.committed[1]
        self._check_version(trained.version)
        if trained.step <= self.state.step:
            raise BusError(f"step {trained.step} after {self.state.step}: it was committed before")
        result = self._leases.ack_step(trained)
        self._set_version(trained.version, trained.step, trained.step)
        self.state.committed = (call, result)
        return result

    # -- the manager's calls -----------------------------------------------------------------

    def judge(self, caller: Caller, verdicts: tuple[Verdict, ...], now: float) -> int:
        """Apply verdicts. Returns how many changed something."""
        self._enter(caller, now)
        return sum(self._groups.judge(verdict) for verdict in verdicts)

    def drop(self, caller: Caller, group_id: str, reason: str, now: float) -> bool:
        """End a group untrained. False if it has ended, or the trainer holds it: then it is trained."""
        self._enter(caller, now)
        return self._groups.drop(group_id, reason)

    def events(self, caller: Caller, after: int, now: float) -> list[Event]:
        """Events with seq > after. Asking acknowledges those up to `after`."""
        self._enter(caller, now)
        events = self.state.events
        while events and events[0].seq <= after:
            events.popleft()
        self.state.events_acked = max(self.state.events_acked, after)
        self._groups.forget()
        reply: list[Event] = []
        for event in events:
            # A step is told whole: who has read of it has read of all its groups.
            if len(reply) >= EVENTS_PER_REPLY and (event.step is None or event.step != reply[-1].step):
                break
            reply.append(event)
        return reply

    def seed(self, caller: Caller, fates: dict[str, int], through_step: int, lineage: int, now: float) -> bool:
        """What the ledger knows of earlier epochs: samples by fate, trained up to `through_step` of its `lineage`.

        Counts once per epoch: False when this one was told before.
        """
        self._enter(caller, now)
        if self.state.seeded_through is not None:
            return False
        self.state.seeded_through = through_step
        self.state.lineage = lineage
        self.state.settled.update(fates)
        self.state.produced += sum(fates.values())
        self.state.woken.add("seed")
        return True

    def recommit(self, caller: Caller, steps: tuple[TrainedStep, ...], now: float) -> int | None:
        """Steps that the trainer took before this epoch: those that nobody knows count now.

        Returns how many did, or None while the ledger has not spoken (`seed`).
        """
        self._enter(caller, now)
        if self.state.seeded_through is None:
            return None
        new = [step for step in steps if step.step > max(self.state.seeded_through, self.state.step)]
        for step in new:
            for group_id, samples in step.groups.items():
                self._groups.trained_elsewhere(group_id, samples, step.step, step.version)
            self._set_version(step.version, step.step, step.step)
        return len(new)

    def close_topic(self, caller: Caller, topic: str, now: float) -> None:
        self._enter(caller, now)
        if topic not in (PROMPTS, SAMPLES, TRAINING):
            raise BusError(f"unknown topic {topic!r}")
        self.state.closed.add(topic)
        self.state.woken |= {"rollout", "actor", *self._queues.rows}

    def set_version(self, caller: Caller, version: int, of_step: int, step: int, now: float) -> None:
        """The newest published version, the step that published it, and the newest step that was trained.

        The last two differ while steps are trained again. Versions never fall; BusError if one does.
        """
        self._enter(caller, now)
        self._check_version(version)
        self._set_version(version, of_step, step)

    def _check_version(self, version: int) -> None:
        if version < self.state.version:
            raise BusError(f"version {version} after {self.state.version}: versions only grow")

    def _set_version(self, version: int, of_step: int, step: int) -> None:
        if version > self.state.version or not self.state.steps_of:
            self.state.steps_of[version] = of_step
        self.state.version, self.state.step = version, step
        self.state.woken.add("actor")

    def gc(self, caller: Caller, through_step: int, now: float) -> int:
        """Free groups trained in steps <= through_step (a checkpoint covers them). Rows freed."""
        self._enter(caller, now)
        return self._groups.collect_trained(through_step)

    def collect_eval(self, caller: Caller, group_ids: tuple[str, ...], now: float) -> int:
        """Free eval groups that were read. Rows freed."""
        self._enter(caller, now)
        return self._groups.collect_eval(group_ids)

    def rollback(self, caller: Caller, to: Rollback, now: float) -> bool:
        """Go back to the state after `to.to_step`: what was trained later is trained again from the same rows.

        Once per lineage: True, and nothing more, when this one, or a later one, has begun. False, and nothing changes,
        when rows that would be trained again are gone: then only an empty bus and the ledger can go on.
        """
        self._enter(caller, now)
        if to.lineage <= self.state.lineage:
            return True
        if not self._groups.rollback(to):
            return False
        self.state.lineage = to.lineage
        self.state.step = min(self.state.step, to.to_step)
        self.state.committed = None
        self.state.closed.clear()
        self.state.counters["rollbacks"] += 1
        return True

    def open_groups(self, caller: Caller, now: float) -> dict[str, bool]:
        """The training groups that have not ended, and whether all their members are terminal."""
        self._enter(caller, now)
        return {group_id: self.state.groups[group_id].complete for group_id in self.state.open_train}

    # -- the host's calls --------------------------------------------------------------------

    def take_garbage(self) -> list[Garbage]:
        """Storage rows to free. Their room returns with `freed`."""
        garbage = list(self.state.garbage)
        self.state.garbage.clear()
        return garbage

    def freed(self, garbage: list[Garbage]) -> None:
        self._groups.freed(garbage)
        for row in garbage:
            self._puts.partitions.leave(row.partition)

    def take_empty_partitions(self) -> list[str]:
        empty = list(self._puts.partitions.empty)
        self._puts.partitions.empty.clear()
        return empty

    def take_woken(self) -> set[str]:
        woken, self.state.woken = self.state.woken, set()
        return woken

    def account(self) -> Account:
        return account(self.state)

    def stats(self, now: float) -> BusStats:
        self.tick(now)
        return snapshot(self.state, self._queues, self.epoch, now)

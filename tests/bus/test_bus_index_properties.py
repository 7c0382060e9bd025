"""The index under random traffic: crashes, expiries, drops, late writes, a tight budget.

behaviour: B15, B16, B26, B35. After every step the books must agree with a count of what is
there; in the end, with producers and consumers that go on, everything must finish.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from bus_driver import EVAL, Driver, version
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus.errors import BusError, IncompleteGroup, IncompleteRow
from bus.index.state import Group, LeaseState
from bus.records import Closed, Empty, EventKind, Grant, Rollback, VerdictKind

OWNERS = ("rollout", "reward", "ref", "actor")
MAX_ROWS = 14
MAX_BYTES = 14 * 200


class Traffic(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.d = Driver(max_rows=MAX_ROWS, max_bytes=MAX_BYTES, partition_rows=5, plan_ttl_s=7.0)
        self.state = self.d.index.state
        self.held: dict[str, list[str]] = {owner: [] for owner in OWNERS}
        self.plans: list[tuple[str, list[str]]] = []
        self.seq = 0
        self.version = 0
        self.step = 0
        self.produced: set[str] = set()
        self.trained: list[str] = []
        self.acked_events = 0
        self.evals: set[str] = set()

    # -- producers

    @rule(size=st.integers(1, 3), evaluate=st.sampled_from([False, False, True]))
    def admit(self, size: int, evaluate: bool) -> None:
        more = {"purpose": EVAL} if evaluate else {}
        plan = self.d.plan(
            "manager", [self.d.admission(f"g{self.seq}", self.seq, size, min_version=self.version, **more)]
        )
        if plan is not None:
            self.d.index.commit_put(self.d.callers["manager"], plan.put_id, self.d.now)
            if evaluate:
                self.evals.add(f"g{self.seq}")
            self.seq += 1

    @precondition(lambda self: self.state.groups)
    @rule(data=st.data())
    def readmit(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.state.groups)))
        spec = self.state.groups[group].spec
        self.d.put("manager", [self.d.admission(group, spec.seq, spec.group_size, attempt=spec.attempt + 1)])

    @rule(count=st.integers(1, 3))
    def lease_rollout(self, count: int) -> None:
        self._lease("rollout", max_items=count, version=version(self.version))

    @precondition(lambda self: self.held["rollout"])
    @rule(data=st.data(), value=st.sampled_from(["", "", "other"]), commit=st.booleans(), ack=st.booleans())
    def produce(self, data: st.DataObject, value: str, commit: bool, ack: bool) -> None:
        lease = self._some_lease("rollout", data)
        if lease is None:
            return
        group = data.draw(st.sampled_from(sorted(lease.items)))
        size = self.state.groups[group].spec.group_size
        k = data.draw(st.integers(0, size - 1))
        tokens = data.draw(st.integers(1, 10))
        header = self.d.sample(group, k, tokens=tokens, value=value, oldest_version=self.version)
        plan = self.d.plan("rollout", [header], lease.lease_id, ack=ack)
        if plan.rows:
            self.plans.append((plan.put_id, [row.row_id for row in plan.rows]))
        if commit and self.plans:
            self.commit()

    @precondition(lambda self: self.plans)
    @rule()
    def commit(self) -> None:
        put_id, rows = self.plans.pop(0)
        self._commit("rollout", put_id, rows)

    def _commit(self, owner: str, put_id: str, rows: list[str]) -> None:
        try:
            result = self.d.index.commit_put(self.d.callers[owner], put_id, self.d.now)
        except BusError:
            return
        if result.stored:
            self.produced.update(row.rsplit("/", 1)[0] for row in rows)

    @precondition(lambda self: self.state.groups)
    @rule(data=st.data())
    def tombstone(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.state.groups)))
        k = data.draw(st.integers(0, len(self.state.groups[group].members) - 1))
        if self.state.groups[group].actor.lease_id is None:
            self.d.index.tombstone(self.d.callers["rollout"], group, k, "abort", None, self.d.now)

    # -- consumers

    @rule(count=st.integers(1, 4))
    def lease_reward(self, count: int) -> None:
        self._lease("reward", max_items=count)

    @rule(count=st.integers(1, 4))
    def lease_ref(self, count: int) -> None:
        self._lease("ref", max_items=count)

    @rule(count=st.integers(1, 3), slots=st.sampled_from([None, 1, 2]), hold=st.booleans(), bound=st.booleans())
    def lease_actor(self, count: int, slots: int | None, hold: bool, bound: bool) -> None:
        self._lease(
            "actor",
            max_items=count,
            version=version(self.version),
            slots_left=slots,
            hold_below=version(self.version - 1) if hold else None,
            max_token_lag=2 if bound else None,
        )

    @precondition(lambda self: self.held["reward"])
    @rule(data=st.data(), value=st.sampled_from([0.0, 1.0]), ack=st.booleans())
    def score(self, data: st.DataObject, value: float, ack: bool) -> None:
        lease = self._some_lease("reward", data)
        if lease is not None:
            rows = [self.d.reward_of(row, value) for row in lease.items]
            result = self.d.put("reward", rows, lease.lease_id, ack=ack)
            assert result.ended is ack

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def acknowledge(self, data: st.DataObject, owner: str) -> None:
        lease = self._some_lease(owner, data)
        if lease is None:
            return
        items = list(lease.items)
        try:
            result = self.d.ack(owner, lease.lease_id, step=self.step + 1)
        except (IncompleteGroup, IncompleteRow):
            return
        if owner == "actor":
            assert not result.void
            self.trained += items
            assert len(set(self.trained)) == len(self.trained), "a group was trained twice"

    @rule(data=st.data(), owner=st.sampled_from(OWNERS), reason=st.sampled_from(["error", "drain"]))
    def release(self, data: st.DataObject, owner: str, reason: str) -> None:
        lease = self._some_lease(owner, data)
        if lease is not None:
            self.d.release(owner, lease.lease_id, reason)

    @rule(owner=st.sampled_from(OWNERS))
    def crash(self, owner: str) -> None:
        self.d.callers[owner] = self.d.index.register(owner, self.d.now)
        assert not [lease for lease in self.state.leases.values() if lease.owner == owner]

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.d.now += seconds
        self.d.index.tick(self.d.now)

    # -- manager

    @precondition(lambda self: self.state.groups)
    @rule(data=st.data(), kind=st.sampled_from([VerdictKind.ACCEPTED] * 3 + [VerdictKind.FILTERED]))
    def judge(self, data: st.DataObject, kind: VerdictKind) -> None:
        self.d.judge(data.draw(st.sampled_from(sorted(self.state.groups))), kind)

    @precondition(lambda self: self.state.groups)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.d.index.drop(
            self.d.callers["manager"], data.draw(st.sampled_from(sorted(self.state.groups))), "late", self.d.now
        )

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.step += 1
        self.d.index.set_version(self.d.callers["actor"], self.version, self.step, self.step, self.d.now)

    @rule()
    def read_events(self) -> None:
        events = self.d.events(self.acked_events)
        assert [event.seq for event in events] == sorted({event.seq for event in events})
        if events:
            self.acked_events = events[-1].seq

    @rule()
    def checkpoint(self) -> None:
        self.d.index.gc(self.d.callers["actor"], self.step, self.d.now)

    @rule(steps=st.integers(0, 3))
    def roll_back(self, steps: int) -> None:
        """All of it, or nothing where rows are gone; the trainer has died before it."""
        before, lineage = self.d.index.account(), self.state.lineage
        self.d.callers["actor"] = self.d.index.register("actor", self.d.now)
        to_step = max(0, self.step - steps)
        if self.d.index.rollback(self.d.callers["manager"], Rollback(lineage + 1, to_step, ()), self.d.now):
            assert self.state.lineage == lineage + 1
            assert not any(step > to_step for step in self.state.trained_in)
            assert not any(e.kind is EventKind.TRAINED and e.step > to_step for e in self.state.events if e.step)
            self.step = to_step
            self.trained = [group_id for group_id in self.trained if group_id not in self.state.open_train]
        else:
            assert self.d.index.account() == before and self.state.lineage == lineage

    @rule()
    def collect(self) -> None:
        self.d.collect()

    @rule(accept=st.booleans())
    def produce_and_score(self, accept: bool = False) -> None:
        """All that is free to take, so that random traffic reaches the trainer often."""
        generating = self._lease("rollout", max_items=8)
        if isinstance(generating, Grant):
            for group in generating.groups:
                rows = [self.d.sample(group.group_id, k, oldest_version=self.version) for k in group.missing]
                plan = self.d.plan("rollout", rows, generating.lease_id)
                self._commit("rollout", plan.put_id, [row.row_id for row in plan.rows])
            self.d.ack("rollout", generating.lease_id)
        scoring = self._lease("reward", max_items=50)
        if isinstance(scoring, Grant):
            self.d.put("reward", [self.d.reward_of(row.row_id) for row in scoring.rows], scoring.lease_id)
            self.d.ack("reward", scoring.lease_id)
        for group_id in [group.spec.group_id for group in self._open() if accept and group.is_train]:
            self.d.judge(group_id)

    # -- helpers

    def _lease(self, task: str, **request: Any) -> Grant | Empty | Closed:
        grant = self.d.lease(task, **request)
        if isinstance(grant, Grant):
            self.held[task].append(grant.lease_id)
            if task == "actor":
                self._check_whole_groups(grant)
        return grant

    def _check_whole_groups(self, grant: Grant) -> None:
        by_group = Counter(row.group_id for row in grant.rows)
        for group in grant.groups:
            assert by_group.pop(group.group_id) == group.group_size - len(group.tombstones)
        assert not by_group

    def _some_lease(self, owner: str, data: st.DataObject) -> LeaseState | None:
        self.held[owner] = [lease for lease in self.held[owner] if lease in self.state.leases]
        if not self.held[owner]:
            return None
        return self.state.leases[data.draw(st.sampled_from(self.held[owner]))]

    def _open(self) -> list[Group]:
        return [group for group in self.state.groups.values() if group.fate is None]

    # -- what must hold

    @invariant()
    def accounts_balance(self) -> None:
        account = self.d.index.account()
        evals = {s for s in self.produced if self._is_eval(s)}
        assert account.produced == len(self.produced - evals)
        assert account.balanced, account
        assert self.state.eval_produced == len(evals)

    def _is_eval(self, sample: str) -> bool:
        return sample.split("/")[0] in self.evals

    @invariant()
    def nothing_is_leased_twice(self) -> None:
        taken: Counter[tuple[str, str]] = Counter()
        holds: Counter[str] = Counter()
        for lease in self.state.leases.values():
            assert lease.items
            taken.update((lease.task, item) for item in lease.items)
            holds.update(item.split("/")[0] for item in lease.items)
        assert all(count == 1 for count in taken.values())
        for group_id, group in self.state.groups.items():
            assert group.holds == holds[group_id]
            for task, claim in (("rollout", group.rollout), ("actor", group.actor)):
                assert (claim.lease_id is not None) == ((task, group_id) in taken)

    @invariant()
    def budget_is_kept_and_equals_what_is_there(self) -> None:
        budget, groups = self.state.budget, self.state.groups.values()
        assert budget.used_rows + budget.reserved_rows <= MAX_ROWS
        assert budget.used_bytes + budget.reserved_bytes <= MAX_BYTES
        assert not self.state.counters["overruns"]
        plans = self.state.plans.values()
        members = [member for group in groups for member in group.members]
        assert budget.reserved_rows == sum(m.reserved_rows for m in members) + sum(p.reserved_rows for p in plans)
        assert budget.reserved_bytes == sum(m.reserved_bytes for m in members) + sum(p.reserved_bytes for p in plans)
        for retained, rows, nbytes in (
            (False, budget.used_rows, budget.used_bytes),
            (True, budget.retained_rows, budget.retained_bytes),
        ):
            live = [
                row
                for group in groups
                if not group.freed and group.retained == retained
                for row in (group.prompt, *group.sample_rows())
                if row.visible
            ]
            dead = [row for row in self.state.garbage if row.retained == retained]
            assert rows == len(live) + sum(row.rows for row in dead)
            assert nbytes == sum(row.charge for row in live) + sum(row.bytes for row in dead)

    @invariant()
    def ended_groups_reserve_nothing(self) -> None:
        """behaviour: B15"""
        for group in self.state.groups.values():
            if group.fate is not None or not group.missing:
                assert not any(member.reserved_rows or member.reserved_bytes for member in group.members)

    @invariant()
    def sets_of_open_work_equal_a_scan(self) -> None:
        open_groups = self._open()
        assert self.state.unproduced == {g.spec.group_id for g in open_groups if g.missing}
        assert self.state.incomplete == {g.spec.group_id for g in open_groups if not g.complete}
        assert self.state.open_train == {g.spec.group_id for g in open_groups if g.is_train}
        waiting = Counter(g.spec.min_version for g in open_groups if g.is_train and g.actor.lease_id is None)
        assert self.state.waiting_by_version == waiting

    @invariant()
    def whatever_is_eligible_is_queued(self) -> None:
        queues = self.d.index._queues
        for group in self._open():
            if queues._to_generate(group):
                assert group.spec.group_id in queues.prompts[group.purpose]._queued
            if queues.groups is not None and queues._to_train(group):
                assert group.spec.group_id in queues.groups._queued
            for queue in queues.rows.values():
                for row in group.sample_rows():
                    assert not queue.wants(row) or row.row_id in queue.ready._queued

    # -- in the end

    def teardown(self) -> None:
        """Liveness: all go on, so all finishes, the budget is whole again, and leases answer Closed."""
        self.d.index.close_topic(self.d.callers["manager"], "prompts", self.d.now)
        for _ in range(200):
            self._work_once()
            if not self._open():
                break
        assert not self._open(), [group.spec for group in self._open()]
        for owner in OWNERS:
            assert self.d.lease(owner) == Closed(owner)
        self.d.index.gc(self.d.callers["actor"], self.step + 1, self.d.now)
        self.d.collect()
        self.read_events()
        self.d.events(self.state.event_seq)
        stats = self.d.index.stats(self.d.now)
        assert (stats.rows, stats.bytes, stats.reserved_rows, stats.reserved_bytes) == (0, 0, 0, 0)
        assert (stats.retained_rows, stats.retained_bytes, stats.leases) == (0, 0, {})
        assert (self.state.prompt_rows, self.state.prompt_bytes) == (0, 0)
        assert not self.state.groups and not self.state.rows and not self.state.waiting_by_version
        assert stats.account.queued == 0
        self.accounts_balance()

    def _work_once(self) -> None:
        self.d.now += 11.0
        self.d.collect()
        self.produce_and_score()
        for group in self._open():
            if group.complete and not group.is_train:
                self.d.index.collect_eval(self.d.callers["manager"], (group.spec.group_id,), self.d.now)
            elif group.complete:
                survivors = any(member.tombstone is None for member in group.members)
                self.d.judge(group.spec.group_id, VerdictKind.ACCEPTED if survivors else VerdictKind.DROPPED, "empty")
        training = self._lease("actor", max_items=8)
        if isinstance(training, Grant):
            self.d.ack("actor", training.lease_id, step=self.step + 1)


Traffic.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestIndexUnderRandomTraffic = Traffic.TestCase

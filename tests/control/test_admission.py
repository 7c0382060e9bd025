"""Admission: capacity, lag bounds, liveness. The properties run a whole simulated run."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.index.overdue import held_slots
from relax.config.run import Overdue, RunConfig
from relax.control.admission import (
    AdmissionRefused,
    AdmissionState,
    DropReason,
    Limits,
    OpenGroup,
    due_drops,
    hold_below,
    overdue_groups,
    trainable_lag,
)
from relax.types import GroupId, PolicyVersion

DEADLINE_S = 50.0


def limits(b: int = 2, s: int = 1, steps: int = 5, policy: Overdue = Overdue.TRAIN, bound: int | None = None) -> Limits:
    default = 2 * s + 2 if policy is Overdue.TRAIN else s
    return Limits(b, s, steps, policy, default if bound is None else bound, DEADLINE_S)


def gid(number: int) -> GroupId:
    return GroupId(f"toy:0:{number}")


def filled(lim: Limits, count: int) -> AdmissionState:
    state = AdmissionState(lim)
    for number in range(count):
        state.admit(gid(number), 0.0)
    return state


def test_capacity_is_s_plus_one_steps_of_groups() -> None:
    """behaviour: B15"""
    state = AdmissionState(limits(b=4, s=2))
    assert state.capacity == 12
    for number in range(12):
        assert state.admit(gid(number), 0.0) == 0
    assert state.capacity == 0
    with pytest.raises(AdmissionRefused, match="12 of 12 in flight"):
        state.admit(gid(12), 0.0)


def test_every_way_out_returns_the_reservation_once() -> None:
    """behaviour: B15"""
    state = filled(limits(b=2, s=1), 4)
    assert state.mark_filtered(gid(0)) and not state.mark_filtered(gid(0))
    assert state.mark_dropped(gid(1), "deadline") and not state.mark_dropped(gid(1), "deadline")
    assert state.step_committed(PolicyVersion(1), [gid(2), gid(2), gid(0)]) == 1
    assert (state.capacity, state.outstanding, state.admitted) == (3, 1, 4)
    assert (state.trained, state.filtered, dict(state.dropped)) == (1, 1, {"deadline": 1})


def test_a_group_admitted_after_a_step_carries_the_version_which_that_step_published() -> None:
    """behaviour: B15"""
    state = filled(limits(), 4)
    state.step_committed(PolicyVersion(1), [gid(0), gid(1)])
    assert state.admit(gid(4), 1.0) == 1
    with pytest.raises(ValueError, match="version 0 after version 1"):
        state.step_committed(PolicyVersion(0), [])


def test_no_more_is_admitted_at_the_end_than_the_last_steps_need() -> None:
    state = filled(limits(b=2, s=1, steps=3), 4)
    state.step_committed(PolicyVersion(1), [gid(0), gid(1)])
    assert state.capacity == 2
    state.admit(gid(4), 0.0)
    state.admit(gid(5), 0.0)
    state.step_committed(PolicyVersion(2), [gid(2), gid(3)])
    assert state.capacity == 0
    state.mark_filtered(gid(4))
    assert state.capacity == 1, "a filtered group is replaced"
    state.admit(gid(6), 0.0)
    state.step_committed(PolicyVersion(3), [gid(5), gid(6)])
    assert state.finished and state.closing


def test_an_exhausted_source_closes_admission_and_finishes_once_drained() -> None:
    state = filled(limits(), 3)
    state.exhausted = True
    assert state.closing and not state.finished
    for number in range(3):
        state.mark_filtered(gid(number))
    assert state.finished


def test_a_new_attempt_keeps_the_counts_and_gets_the_present_version_and_deadline() -> None:
    """behaviour: B15"""
    state = filled(limits(), 4)
    state.mark_complete(gid(3))
    state.step_committed(PolicyVersion(1), [gid(0), gid(1)])
    assert state.forget(gid(3)) and not state.forget(gid(0)), "its rows are lost; the other one has ended"
    assert state.admit(gid(3), 40.0) == 1
    assert (state.outstanding, state.admitted) == (2, 4)
    assert [drop.group_id for drop in state.due_drops(DEADLINE_S)] == [gid(2)]
    assert [drop.group_id for drop in state.due_drops(40.0 + DEADLINE_S)] == [gid(2), gid(3)]
    with pytest.raises(AdmissionRefused, match="in flight already"):
        state.admit(gid(3), 40.0)


def test_overdue_are_incomplete_groups_admitted_s_versions_ago_or_earlier() -> None:
    """behaviour: B18"""
    groups = [OpenGroup(gid(number), PolicyVersion(version), 0.0) for number, version in enumerate([3, 1, 2, 0])]
    groups[3].complete = True
    assert [group.group_id for group in overdue_groups(groups, PolicyVersion(3), 1)] == [gid(1), gid(2)]
    assert len(overdue_groups(groups, PolicyVersion(3), 0)) == 3


@pytest.mark.parametrize(
    ("policy", "s", "expected"),
    [
        (Overdue.WAIT, 0, 7),
        (Overdue.WAIT, 1, 6),
        (Overdue.WAIT, 3, 4),
        (Overdue.TRAIN, 1, None),
        (Overdue.DROP, 1, None),
    ],
)
def test_only_wait_holds_the_trainer_for_older_groups(policy: Overdue, s: int, expected: int | None) -> None:
    """behaviour: B18"""
    assert hold_below(PolicyVersion(7), s, policy) == expected


@pytest.mark.parametrize(
    ("policy", "age", "reason"),
    [
        (Overdue.DROP, 1, None),
        (Overdue.DROP, 2, DropReason.OVERDUE),
        (Overdue.TRAIN, 4, None),
        (Overdue.TRAIN, 5, DropReason.OVERDUE),
        (Overdue.WAIT, 9, None),
    ],
)
def test_an_incomplete_group_is_given_up_when_it_is_too_old_for_its_policy(
    policy: Overdue, age: int, reason: DropReason | None
) -> None:
    """behaviour: B18"""
    group = OpenGroup(gid(0), PolicyVersion(10 - age), 0.0)
    drops = due_drops([group], PolicyVersion(10), 1.0, limits(s=1, policy=policy))
    assert [drop.reason for drop in drops] == ([] if reason is None else [reason])


@pytest.mark.parametrize("policy", list(Overdue))
def test_an_incomplete_group_is_dropped_at_its_deadline_and_a_complete_one_never(policy: Overdue) -> None:
    """behaviour: B18"""
    state = filled(limits(policy=policy), 2)
    state.mark_complete(gid(1))
    assert state.next_deadline_s() == DEADLINE_S
    assert state.due_drops(DEADLINE_S - 0.001) == []
    assert [(drop.group_id, drop.reason) for drop in state.due_drops(DEADLINE_S)] == [(gid(0), DropReason.DEADLINE)]


def test_limits_of_a_run_follow_its_configuration() -> None:
    lim = Limits.from_run(RunConfig(steps=7, groups_per_step=3, max_staleness=2, group_deadline_s=9.0))
    assert (lim.max_outstanding, lim.groups_needed, lim.policy, lim.token_lag_bound, lim.deadline_s) == (
        9,
        21,
        Overdue.TRAIN,
        6,
        9.0,
    )
    assert trainable_lag(PolicyVersion(1), PolicyVersion(7), lim)
    assert not trainable_lag(PolicyVersion(0), PolicyVersion(7), lim)


@pytest.mark.parametrize(
    ("min_version", "held"),
    [(3, 0), (4, 1), (5, 4), (6, 4)],
    ids=["oldest", "behind one that is due now", "behind 5 of which 1 can wait", "behind 6 of which 4 can wait"],
)
def test_younger_groups_leave_the_slots_that_older_ones_need_to_be_in_time(min_version: int, held: int) -> None:
    """At version 5, S = 2, B = 1 the groups of version 3 are due now, those of 4 a step later.

    behaviour: B15
    """
    waiting = {PolicyVersion(3): 1, PolicyVersion(4): 4, PolicyVersion(5): 1}
    hold = hold_below(PolicyVersion(5), 2, Overdue.WAIT)
    assert held_slots(waiting, PolicyVersion(min_version), hold, groups_per_step=1) == held
    assert held_slots(waiting, PolicyVersion(min_version), None, groups_per_step=1) == 0


@dataclass
class World:
    """A run in which an adversary chooses who generates, finishes, fails and straggles.

    The trainer obeys the bus's rules: whole accepted groups, the token lag bound, and the hold.
    """

    lim: Limits
    rng: random.Random
    fail_share: float
    filter_share: float
    straggler_share: float
    engine_lag: int
    young_first: bool
    state: AdmissionState = field(init=False)
    now_s: float = 0.0
    next_number: int = 0
    taken: list[GroupId] = field(default_factory=list)
    accepted: set[GroupId] = field(default_factory=set)
    oldest_token: dict[GroupId, PolicyVersion] = field(default_factory=dict)
    stragglers: set[GroupId] = field(default_factory=set)
    lags: list[int] = field(default_factory=list)
    steps_done: int = 0

    def __post_init__(self) -> None:
        self.state = AdmissionState(self.lim)

    def turn(self) -> None:
        self.now_s += 1.0
        self.admit()
        for group in self.state.open_groups:
            self.generate(group)
        for drop in self.state.due_drops(self.now_s):
            if drop.group_id not in self.taken:
                assert self.state.mark_dropped(drop.group_id, drop.reason)
        self.train()
        assert self.state.outstanding <= self.lim.max_outstanding
        assert self.state.admitted == self.next_number, "a group was lost from the counts"

    def admit(self) -> None:
        while self.state.capacity:
            group_id = gid(self.next_number)
            self.next_number += 1
            self.state.admit(group_id, self.now_s)
            if self.rng.random() < self.straggler_share:
                self.stragglers.add(group_id)

    def generate(self, group: OpenGroup) -> None:
        if group.complete or group.group_id in self.stragglers:
            return
        if group.group_id not in self.oldest_token:
            if self.rng.random() < 0.5:
                engine = max(group.min_version, self.state.version - self.rng.randint(0, self.engine_lag))
                self.oldest_token[group.group_id] = PolicyVersion(engine)
        elif self.rng.random() < 0.1:
            del self.oldest_token[group.group_id]
            self.state.forget(group.group_id)
            self.state.admit(group.group_id, self.now_s)
        elif self.rng.random() < (0.05 if self.young_first and group.min_version < self.state.version else 0.4):
            self.complete(group.group_id)

    def complete(self, group_id: GroupId) -> None:
        self.state.mark_complete(group_id)
        draw = self.rng.random()
        if draw < self.fail_share:
            self.state.mark_dropped(group_id, "too_few_members")
        elif draw < self.fail_share + self.filter_share:
            self.state.mark_filtered(group_id)
        else:
            self.accepted.add(group_id)

    def train(self) -> None:
        candidates = [g for g in self.state.open_groups if g.group_id in self.accepted and g.group_id not in self.taken]
        self.rng.shuffle(candidates)
        if self.young_first:
            candidates.sort(key=lambda group: -group.min_version)
        for group in candidates:
            if len(self.taken) == self.lim.groups_per_step:
                break
            if not trainable_lag(self.oldest_token[group.group_id], self.state.version, self.lim):
                assert self.lim.policy is not Overdue.WAIT, "wait never has to drop for lag"
                self.state.mark_dropped(group.group_id, "stale")
            elif len(self.taken) + self.held(group) < self.lim.groups_per_step:
                self.taken.append(group.group_id)
        if len(self.taken) == self.lim.groups_per_step:
            self.lags += [self.state.version - self.oldest_token[group_id] for group_id in self.taken]
            assert self.state.step_committed(PolicyVersion(self.state.version + 1), self.taken) == len(self.taken)
            self.taken = []
            self.steps_done += 1

    def held(self, group: OpenGroup) -> int:
        waiting = Counter(other.min_version for other in self.state.open_groups if other.group_id not in self.taken)
        return held_slots(waiting, group.min_version, self.state.hold_below(), self.lim.groups_per_step)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    b=st.integers(1, 4),
    s=st.integers(0, 3),
    steps=st.integers(1, 10),
    policy=st.sampled_from(list(Overdue)),
    fail_share=st.sampled_from([0.0, 0.3]),
    filter_share=st.sampled_from([0.0, 0.4]),
    straggler_share=st.sampled_from([0.0, 0.15]),
    engine_lag=st.integers(0, 6),
    young_first=st.booleans(),
)
def test_every_run_ends_with_its_steps_trained_within_the_bounds(
    seed: int,
    b: int,
    s: int,
    steps: int,
    policy: Overdue,
    fail_share: float,
    filter_share: float,
    straggler_share: float,
    engine_lag: int,
    young_first: bool,
) -> None:
    """Outstanding groups, lag, returned reservations and liveness, whatever overtakes, fails or straggles.

    behaviour: B15, B18
    """
    lim = limits(b, s, steps, policy)
    world = World(lim, random.Random(seed), fail_share, filter_share, straggler_share, engine_lag, young_first)
    for _ in range(200 * steps * (s + 1) + 2000):
        if world.state.finished:
            break
        world.turn()
    assert world.state.finished, "the run hangs"
    assert (world.steps_done, world.state.trained) == (steps, steps * b)
    assert max(world.lags) <= (2 * s + 2 if policy is Overdue.TRAIN else s)
    assert world.state.outstanding == 0


def test_what_was_trained_and_is_undone_has_its_place_again_and_nothing_is_admitted_meanwhile() -> None:
    """behaviour: B15"""
    state = filled(limits(b=2, s=1), 4)
    state.step_committed(PolicyVersion(1), [gid(0), gid(1)])
    state.admit(gid(4), 1.0)
    state.admit(gid(5), 1.0)
    state.undo([gid(0), gid(1)], 2.0)
    assert (state.trained, state.outstanding, state.admitted, state.capacity) == (0, 6, 6, 0)
    assert state.due_drops(60.0) and not {gid(0), gid(1)} & {drop.group_id for drop in state.due_drops(60.0)}
    state.step_committed(PolicyVersion(1), [gid(0), gid(1)])
    assert (state.trained, state.capacity) == (2, 0)
    state.step_committed(PolicyVersion(2), [gid(2)])
    assert state.capacity == 1


def test_what_an_earlier_manager_left_is_taken_up_at_the_version_it_was_admitted_for() -> None:
    """behaviour: B44"""
    state = AdmissionState(limits(b=1, s=0), version=PolicyVersion(5))
    state.take_up(gid(0), PolicyVersion(4), 0.0, complete=True)
    state.take_up(gid(1), PolicyVersion(5), 0.0)
    assert [(group.min_version, group.complete) for group in state.open_groups] == [(4, True), (5, False)]
    assert state.outstanding == 2 and state.capacity == 0
    assert [drop.group_id for drop in state.due_drops(60.0)] == [gid(1)]

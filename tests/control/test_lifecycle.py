"""Life cycles of rollout instances and of runs."""

from __future__ import annotations

import itertools

import pytest

from relax.control.lifecycle import (
    FINAL,
    Deadlines,
    IllegalTransition,
    Instance,
    InstanceState,
    allowed,
)
from relax.control.runstate import IllegalRunTransition, RunState, RunStatus

S = InstanceState
DEADLINES = Deadlines(start_s=100.0, sync_s=10.0, drain_s=20.0)
STRAIGHT = (S.CREATING, S.HEALTH_CHECKING, S.WEIGHT_SYNCING, S.READY, S.ACTIVE)


def walked(*states: InstanceState, step_s: float = 1.0) -> Instance:
    instance = Instance("rollout-0", 0.0)
    for number, state in enumerate(states, 1):
        instance = instance.move(state, number * step_s)
    return instance


def test_an_instance_serves_only_once_it_holds_a_version() -> None:
    """behaviour: B31"""
    instance = Instance("rollout-0", 0.0)
    serving = [instance.serving]
    for state in (*STRAIGHT, S.DRAINING, S.STOPPED):
        instance = instance.move(state, 1.0)
        serving.append(instance.serving)
    assert serving == [False, False, False, False, True, True, False, False]


def test_a_restarted_engine_must_sync_before_it_serves_again() -> None:
    """behaviour: B31"""
    instance = walked(*STRAIGHT).move(S.HEALTH_CHECKING, 9.0, "replica restarted")
    assert (instance.restarts, instance.serving, instance.reason) == (1, False, "replica restarted")
    for shortcut in (S.READY, S.ACTIVE):
        with pytest.raises(IllegalTransition):
            instance.move(shortcut, 10.0)
    assert walked(*STRAIGHT).restarts == 0
    assert S.READY not in allowed(S.ACTIVE)


def test_every_living_state_can_fail_and_final_states_end() -> None:
    for state in S:
        assert allowed(state) == frozenset() if state in FINAL else S.FAILED in allowed(state)


def test_every_state_is_reached_and_every_living_one_leads_to_an_end() -> None:
    reached, frontier = {S.PENDING}, [S.PENDING]
    while frontier:
        new = allowed(frontier.pop()) - reached
        reached |= new
        frontier += new
    assert reached == set(S)
    for state in set(S) - FINAL - {S.PENDING, S.DRAINING}:
        assert S.DRAINING in allowed(state)


def test_an_illegal_change_names_the_instance_and_what_is_allowed() -> None:
    with pytest.raises(IllegalTransition, match="rollout-0 is pending and cannot become active; allowed: creating"):
        Instance("rollout-0", 0.0).move(S.ACTIVE, 1.0)


@pytest.mark.parametrize(
    ("states", "limit_s"), [((S.CREATING,), 101.0), (STRAIGHT[:3], 13.0), ((*STRAIGHT, S.DRAINING), 26.0)]
)
def test_a_stay_longer_than_its_deadline_is_late(states: tuple[InstanceState, ...], limit_s: float) -> None:
    """behaviour: B1"""
    instance = walked(*states)
    assert instance.late(min(limit_s, 100.0) - 0.1, DEADLINES) is None
    text = instance.late(limit_s, DEADLINES)
    assert text is not None and f"rollout-0 is {states[-1]}" in text


def test_the_start_has_one_deadline_over_all_its_states() -> None:
    instance = walked(*STRAIGHT[:4], step_s=24.0)
    assert instance.late(99.0, DEADLINES) is None
    assert "not active 100 s after its creation" in str(instance.late(100.0, DEADLINES))
    assert instance.move(S.ACTIVE, 99.0).late(1e6, DEADLINES) is None
    assert instance.move(S.FAILED, 99.0).late(1e6, DEADLINES) is None


def test_a_run_goes_forward_and_ends_once() -> None:
    status = RunStatus()
    for state in (RunState.RUNNING, RunState.FINISHING, RunState.FINISHED):
        assert not status.ended
        status = status.move(state)
    assert status.ended
    assert status.move(RunState.FAILED, "a late error") == status
    with pytest.raises(IllegalRunTransition, match="finished cannot become running"):
        status.move(RunState.RUNNING)


@pytest.mark.parametrize(("start", "to"), itertools.product(list(RunState)[:3], [RunState.FAILED, RunState.STOPPED]))
def test_a_living_run_can_fail_or_be_stopped_at_any_time(start: RunState, to: RunState) -> None:
    ended = RunStatus(start).move(to, "disk full" if to is RunState.FAILED else "")
    assert ended.ended and ended.state is to


@pytest.mark.parametrize(("to", "reason"), [(RunState.FAILED, ""), (RunState.STOPPED, "why")])
def test_exactly_a_failure_has_a_reason(to: RunState, reason: str) -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        RunStatus(RunState.RUNNING).move(to, reason)


def test_a_run_cannot_finish_before_it_ran() -> None:
    """behaviour: B14"""
    with pytest.raises(IllegalRunTransition):
        RunStatus().move(RunState.FINISHED)

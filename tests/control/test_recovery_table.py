"""The recovery table: an answer for everything, budgets, back-off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.config.recovery import RecoveryConfig
from relax.control.recovery import ROLES, RUN, TABLE, Action, Attempt, Decision, Fault, backoff, decide

CONFIG = RecoveryConfig(budget=3, global_budget=1, bus_budget=2, window_s=100.0, backoff_s=2.0, backoff_max_s=10.0)


def answers(
    role: str, fault: Fault, times: int, config: RecoveryConfig = CONFIG, every_s: float = 1.0
) -> list[Decision]:
    """The answers to a fault that comes back each time, with the budgets that they take."""
    attempts: list[Attempt] = []
    given_: list[Decision] = []
    for number in range(times):
        now = number * every_s
        decision = decide(role, f"{role}-x", fault, attempts, now, config)
        given_.append(decision)
        if decision.budget:
            attempts.append(Attempt(decision.budget, now))
    return given_


@pytest.mark.parametrize("role", [*ROLES, "a role that nobody knows"])
@pytest.mark.parametrize("fault", list(Fault))
def test_every_role_and_fault_has_an_answer(role: str, fault: Fault) -> None:
    """behaviour: B44"""
    decision = decide(role, role, fault, [], 0.0, CONFIG)
    assert isinstance(decision.action, Action) and decision.reason
    assert decision.action is not Action.FAIL_RUN, "nothing fails a run at once"


def test_the_table_names_each_fault_for_each_role() -> None:
    assert set(TABLE) == set(ROLES) and all(set(answers_) == set(Fault) for answers_ in TABLE.values())


def test_local_comes_first_then_global_then_the_run_fails() -> None:
    """behaviour: B44"""
    actions = [decision.action for decision in answers("reward", Fault.HUNG, 5)]
    assert actions == [Action.RESTART_REPLICA] * 3 + [Action.GLOBAL_RECOVERY, Action.FAIL_RUN]


def test_a_lost_bus_is_renewed_until_its_budget_is_spent() -> None:
    actions = [decision.action for decision in answers("bus", Fault.BUS_LOST, 4)]
    assert actions == [Action.RENEW_BUS] * 2 + [Action.GLOBAL_RECOVERY, Action.FAIL_RUN]


def test_a_budget_comes_back_with_time() -> None:
    actions = {decision.action for decision in answers("reward", Fault.HUNG, 20, every_s=CONFIG.window_s / 3 + 1)}
    assert actions == {Action.RESTART_REPLICA}


def test_a_replica_does_not_spend_the_budget_of_another() -> None:
    spent = [Attempt("ref", 0.0)] * 3
    assert decide("reward", "reward", Fault.HUNG, spent, 1.0, CONFIG).action is Action.RESTART_REPLICA
    assert decide("ref", "ref", Fault.HUNG, spent, 1.0, CONFIG).action is Action.GLOBAL_RECOVERY


def test_replacements_share_a_budget_because_their_names_change() -> None:
    attempts: list[Attempt] = []
    actions = []
    for number in range(7):
        decision = decide("instance", f"rollout-{number}", Fault.DEPLOY_FAILED, attempts, 0.0, CONFIG, instances=2)
        actions.append(decision.action)
        attempts.append(Attempt(decision.budget, 0.0))
    assert actions == [Action.REPLACE_INSTANCE] * 6 + [Action.GLOBAL_RECOVERY]


def test_a_straggler_is_replaced_by_policy_only_and_never_costs_the_run() -> None:
    """behaviour: B18"""
    assert decide("instance", "rollout-0", Fault.STRAGGLER, [], 0.0, CONFIG).action is Action.NONE
    replacing = CONFIG.model_copy(update={"replace_stragglers": True})
    actions = [decision.action for decision in answers("instance", Fault.STRAGGLER, 4, replacing)]
    assert actions == [Action.REPLACE_INSTANCE] * 3 + [Action.NONE]


def test_an_evaluator_that_cannot_be_had_does_not_end_training() -> None:
    assert answers("evaluator", Fault.DEPLOY_FAILED, 4)[-1].action is Action.NONE


@given(attempt=st.integers(1, 60))
def test_the_first_answer_comes_at_once_and_the_wait_doubles_up_to_its_bound(attempt: int) -> None:
    wait = backoff(attempt, CONFIG)
    assert wait == (0.0 if attempt == 1 else min(10.0, 2.0 * 2.0 ** (attempt - 2)))


@given(
    role=st.sampled_from(ROLES),
    faults=st.lists(st.tuples(st.sampled_from(list(Fault)), st.floats(0.0, 40.0)), max_size=60),
)
def test_within_a_window_no_budget_is_exceeded_and_nothing_is_done_in_the_past(
    role: str, faults: list[tuple[Fault, float]]
) -> None:
    """behaviour: B44"""
    attempts: list[Attempt] = []
    now = 0.0
    for fault, later in faults:
        now += later
        decision = decide(role, role, fault, attempts, now, CONFIG)
        assert decision.not_before_s >= now
        if decision.action is Action.FAIL_RUN:
            recent = [a for a in attempts if a.budget == RUN and now - a.at_s < CONFIG.window_s]
            assert len(recent) == CONFIG.global_budget
            return
        if decision.budget:
            attempts.append(Attempt(decision.budget, now))
        for budget in {attempt.budget for attempt in attempts}:
            recent = [a for a in attempts if a.budget == budget and now - a.at_s < CONFIG.window_s]
            assert len(recent) <= (CONFIG.global_budget if budget == RUN else CONFIG.budget)

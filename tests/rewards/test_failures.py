import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.rewards.base import RewardResult
from relax.rewards.failures import FailureWindow, settle
from relax.types import RewardState

FAILURES = [RewardState.FAILED, RewardState.TIMEOUT, RewardState.CRASHED]


@given(st.lists(st.sampled_from(list(RewardState)), max_size=300))
def test_the_share_is_that_of_the_last_hundred_calls(states: list[RewardState]) -> None:
    """behaviour: B20"""
    window = FailureWindow()
    for state in states:
        window.record(state)
    last = states[-100:]
    expected = sum(state is not RewardState.OK for state in last) / len(last) if last else 0.0
    assert window.share == pytest.approx(expected)
    assert window.should_stop(0.5) == (len(states) >= 20 and expected > 0.5)


def test_failures_older_than_a_hundred_calls_are_forgotten() -> None:
    """behaviour: B20"""
    window = FailureWindow()
    for state in [RewardState.CRASHED] * 100 + [RewardState.OK] * 99:
        window.record(state)
    assert window.share == 0.01
    window.record(RewardState.OK)
    assert window.share == 0.0


def test_nineteen_failures_stop_nothing_and_the_twentieth_does() -> None:
    """behaviour: B20"""
    window = FailureWindow()
    for _ in range(19):
        window.record(RewardState.FAILED)
    assert not window.should_stop(0.5)
    window.record(RewardState.FAILED)
    assert window.should_stop(0.5)


@pytest.mark.parametrize("state", FAILURES)
def test_a_failure_is_excluded_with_a_reason_or_mapped_by_policy(state: RewardState) -> None:
    """behaviour: B20"""
    failed = RewardResult.failure(state, "why")
    assert settle(failed, "exclude", -1.0).excluded == f"reward_{state.value}"
    floored = settle(failed, "floor", -1.0)
    assert (floored.reward, floored.accuracy, floored.excluded) == (-1.0, 0.0, None)


def test_a_good_result_is_untouched_by_the_policy() -> None:
    good = RewardResult(0.25, 1.0, {"exact": 1.0}, RewardState.OK)
    assert settle(good, "exclude", -1.0) == settle(good, "floor", -1.0)
    assert settle(good, "exclude", -1.0).reward == 0.25

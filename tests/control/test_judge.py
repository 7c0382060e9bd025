"""Verdicts on complete groups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.config.roles import FilterConfig
from relax.control.judge import (
    FilterStreak,
    GroupVerdict,
    JudgeError,
    Member,
    NoSignal,
    Outcome,
    constant_reward_warning,
    judge_group,
)

NONE = FilterConfig()
BAND = FilterConfig(kind="accuracy_band")


def members(*accuracies: float | None, reward: float = 1.0) -> list[Member]:
    """None is a tombstone."""
    return [
        Member(k, "reward_failed") if accuracy is None else Member(k, None, reward, accuracy, "ok")
        for k, accuracy in enumerate(accuracies)
    ]


@pytest.mark.parametrize(
    ("minimum", "outcome"), [(None, Outcome.DROPPED), (3, Outcome.ACCEPTED), (4, Outcome.DROPPED), (9, Outcome.DROPPED)]
)
def test_survivors_are_trained_only_if_the_minimum_survived(minimum: int | None, outcome: Outcome) -> None:
    verdict = judge_group(members(1.0, None, 0.0, 1.0), 4, minimum, NONE)
    assert (verdict.outcome, verdict.survivors) == (outcome, (0, 2, 3))
    if outcome is Outcome.DROPPED:
        assert verdict.reason == "too_few_members"
        assert "3 of 4 samples survived" in verdict.detail and "reward_failed" in verdict.detail


def test_a_group_without_survivors_is_dropped() -> None:
    assert judge_group(members(None, None), 2, 1, NONE).outcome is Outcome.DROPPED


@pytest.mark.parametrize(
    ("accuracies", "outcome", "reason"),
    [
        ((0.0, 0.0), Outcome.FILTERED, "accuracy_low"),
        ((1.0, 1.0), Outcome.FILTERED, "accuracy_high"),
        ((0.0, 1.0), Outcome.ACCEPTED, ""),
        ((None, 1.0), Outcome.FILTERED, "accuracy_high"),
    ],
)
def test_the_band_is_open_at_both_ends(accuracies: tuple[float | None, ...], outcome: Outcome, reason: str) -> None:
    """behaviour: B29"""
    verdict = judge_group(members(*accuracies), 2, 1, BAND)
    assert (verdict.outcome, verdict.reason) == (outcome, reason)


def test_the_filter_reads_raw_accuracy_and_not_the_shaped_reward() -> None:
    """behaviour: B29"""
    shaped = [Member(k, None, reward=float(k), accuracy=1.0) for k in range(4)]
    assert judge_group(shaped, 4, None, BAND).outcome is Outcome.FILTERED
    flat = [Member(k, None, reward=0.5, accuracy=float(k % 2)) for k in range(4)]
    assert judge_group(flat, 4, None, BAND).outcome is Outcome.ACCEPTED


def test_a_group_without_any_accuracy_is_dropped_by_the_filter_and_never_read_as_zero() -> None:
    """behaviour: B29"""
    verdict = judge_group([Member(0, None, reward=0.0), Member(1, None, reward=0.0)], 2, None, BAND)
    assert (verdict.outcome, verdict.reason) == (Outcome.DROPPED, "no_accuracy")


@given(st.permutations(range(5)), st.sets(st.integers(0, 4)), st.integers(1, 5))
def test_the_verdict_depends_on_ids_and_not_on_the_order_of_members(
    order: list[int], lost: set[int], minimum: int
) -> None:
    """behaviour: B26"""
    group = members(*(None if k in lost else k / 4 for k in range(5)))
    verdict = judge_group([group[k] for k in order], 5, minimum, BAND)
    assert verdict == judge_group(group, 5, minimum, BAND)
    assert verdict.survivors == tuple(sorted(set(range(5)) - lost))


@pytest.mark.parametrize("ks", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 3]])
def test_a_group_with_a_missing_repeated_or_foreign_member_is_refused(ks: list[int]) -> None:
    """behaviour: B26"""
    with pytest.raises(JudgeError, match="needs each k once"):
        judge_group([Member(k, None, 1.0, 1.0) for k in ks], 3, 1, NONE)


LOW = GroupVerdict(Outcome.FILTERED, "accuracy_low")
HIGH = GroupVerdict(Outcome.FILTERED, "accuracy_high")


def test_a_streak_of_filtered_prompts_ends_with_an_error_that_names_task_and_filter() -> None:
    """behaviour: B28"""
    streak = FilterStreak("toy/sort", FilterConfig(kind="accuracy_band", max_filtered_prompts=3))
    streak.observe(LOW)
    streak.observe(LOW)
    with pytest.raises(NoSignal) as raised:
        streak.observe(HIGH)
    text = str(raised.value)
    for part in ("'toy/sort'", "last 3 prompts", "accuracy_band", "2 were too low, 1 too high", "max_filtered_prompts"):
        assert part in text


def test_an_accepted_group_ends_the_streak_and_a_dropped_one_does_not() -> None:
    """behaviour: B28"""
    streak = FilterStreak("t", FilterConfig(kind="accuracy_band", max_filtered_prompts=3))
    for verdict in (LOW, LOW, GroupVerdict(Outcome.ACCEPTED), LOW, GroupVerdict(Outcome.DROPPED), LOW):
        streak.observe(verdict)
    assert streak.length == 2


def test_a_constant_reward_over_a_step_is_warned_about() -> None:
    """behaviour: B21"""
    warning = constant_reward_warning(4, [0.5, 0.5, 0.5])
    assert warning is not None and "step 4" in warning and "0.5" in warning
    assert constant_reward_warning(4, [0.5, 0.5, 0.25]) is None
    assert constant_reward_warning(4, [0.5]) is None


def test_an_own_filter_decides_on_the_members_that_have_rows() -> None:
    """behaviour: B29"""
    config = FilterConfig(kind="mine.py:spread")
    seen: list[list[int]] = []

    def spread(members: Sequence[Member]) -> bool:
        seen.append([member.k for member in members])
        return max(m.reward or 0 for m in members) > 0.5

    members = [Member(0, reward=1.0), Member(1, tombstone="failed"), Member(2, reward=0.0)]
    assert judge_group(members, 3, 2, config, spread).outcome is Outcome.ACCEPTED
    low = judge_group([Member(0, reward=0.1), Member(1, reward=0.2)], 2, None, config, spread)
    assert (low.outcome, low.reason) == (Outcome.FILTERED, "own_filter")
    assert seen == [[0, 2], [0, 1]]
    with pytest.raises(JudgeError, match="True or False is needed"):
        judge_group([Member(0, reward=0.1), Member(1, reward=0.2)], 2, None, config, lambda _: 0.3)  # type: ignore[arg-type, return-value]

import dataclasses
from typing import Any

import numpy as np
import pytest

from relax.config.roles import ExpectConfig
from relax.telemetry.summary import (
    FinalFacts,
    build_summary,
    check_expectations,
    overhead_ms_per_step,
    paired_bootstrap_lower95,
)

FACTS = FinalFacts(
    wall_s=12.0,
    engine_versions={"rollout-0": 40, "rollout-1": 39},
    digest_ok=True,
    logprob_gap_max=2e-6,
    produced=100,
    trained=80,
    dropped_by_reason={"filtered": 12, "reward_failed": 3},
    queued=5,
    restarts_unasked=0,
    lag_histogram={1: 30, 0: 50},
)


def records(count: int) -> list[dict[str, float]]:
    return [{"step": k + 1.0, "reward_mean": k / 10, "accuracy_mean": k / 20} for k in range(count)]


def good(**changes: Any) -> dict[str, Any]:
    return {**build_summary(records(40), FACTS, seed=1), **changes}


def test_the_summary_counts_and_reduces() -> None:
    summary = build_summary(records(40), FACTS, seed=1)
    assert summary["steps"] == 40
    assert summary["reward_first"] == 0.0
    assert summary["reward_last"] == pytest.approx(3.85)  # 5 % of 40 steps: the last two
    assert summary["accuracy_last"] == pytest.approx(1.925)
    assert summary["dropped"] == 15
    assert list(summary["lag_histogram"].items()) == [("0", 50), ("1", 30)]
    assert summary["eval_before"] is None and summary["eval_gain_lower95"] is None


@pytest.mark.parametrize(("count", "last"), [(1, 0.0), (19, 1.8), (20, 1.9), (60, 5.8)])
def test_the_last_value_is_a_mean_over_five_percent_of_the_steps_but_at_least_one(count: int, last: float) -> None:
    assert build_summary(records(count), FACTS, seed=1)["reward_last"] == pytest.approx(last)


def test_the_largest_gap_of_steps_and_adoptions_counts() -> None:
    """behaviour: B6"""
    with_gap = [{"step": 1.0, "logprob_gap_max": 5e-5}, {"step": 2.0, "logprob_gap_max": 1e-6}]
    assert build_summary(with_gap, FACTS, seed=1)["logprob_gap_max"] == 5e-5
    assert build_summary([], FACTS, seed=1)["logprob_gap_max"] == 2e-6


def timed(step_s: float, train_s: float, engine_s: float) -> dict[str, float]:
    return {"step_s": step_s, "train_compute_s": train_s, "engine_busy_s": engine_s}


def test_overhead_is_what_training_and_generation_do_not_explain() -> None:
    steps = [timed(1.0, 0.4, 0.5)] * 10
    assert overhead_ms_per_step(steps, max_staleness=0) == pytest.approx(100)
    assert overhead_ms_per_step(steps, max_staleness=1) == pytest.approx(500)
    assert overhead_ms_per_step([timed(1.0, 0.4, 0.2)] * 10, max_staleness=1) == pytest.approx(600)
    assert overhead_ms_per_step([], 1) is None
    assert overhead_ms_per_step([{"step": 1.0}], 1) is None


def test_overhead_does_not_mind_to_which_step_of_a_window_the_engine_time_was_booked() -> None:
    steps = [timed(1.0, 0.25, 0.0), timed(1.0, 0.25, 1.5)] * 10
    assert overhead_ms_per_step(steps, max_staleness=1) == pytest.approx(250)


def test_overhead_leaves_the_warm_up_out_and_one_slow_stretch_does_not_count() -> None:
    slow, usual = timed(9.0, 0.0, 0.0), timed(0.5, 0.2, 0.1)
    steps = [slow] * 10 + [usual] * 20 + [slow] * 10 + [usual] * 10
    assert overhead_ms_per_step(steps, max_staleness=0) == pytest.approx(200)
    assert build_summary(steps, FACTS, seed=1)["overhead_ms_per_step"] == overhead_ms_per_step(steps, 0)


def test_the_bootstrap_of_a_constant_gain_is_that_gain() -> None:
    assert paired_bootstrap_lower95([0.0, 1.0, 0.0], [0.5, 1.5, 0.5], seed=1) == pytest.approx(0.5)


def test_the_bootstrap_agrees_with_the_normal_approximation() -> None:
    generator = np.random.default_rng(3)
    before = generator.integers(0, 2, 500).astype(float)
    after = np.clip(before + generator.integers(0, 2, 500), 0, 1)
    gains = after - before
    expected = gains.mean() - 1.645 * gains.std() / np.sqrt(500)
    assert paired_bootstrap_lower95(list(before), list(after), seed=1) == pytest.approx(expected, abs=3e-3)


def test_the_bootstrap_pairs_and_repeats() -> None:
    before, after = [0.0, 1.0] * 50, [0.1, 1.1] * 50
    bound = paired_bootstrap_lower95(before, after, seed=1)
    assert bound == pytest.approx(0.1)  # unpaired it would be far below
    noisy = [value + 0.01 * (k % 37) for k, value in enumerate(after)]
    assert paired_bootstrap_lower95(before, noisy, 1) == paired_bootstrap_lower95(before, noisy, 1)


@pytest.mark.parametrize(("before", "after"), [([], []), ([1.0], [1.0, 2.0])])
def test_the_bootstrap_refuses_what_is_no_pairing(before: list[float], after: list[float]) -> None:
    with pytest.raises(ValueError, match="paired"):
        paired_bootstrap_lower95(before, after, seed=1)


def test_evaluations_enter_the_summary() -> None:
    facts = dataclasses.replace(FACTS, eval_before=[0.0, 0.0, 1.0, 0.0], eval_after=[1.0, 1.0, 1.0, 1.0])
    summary = build_summary(records(2), facts, seed=1)
    assert (summary["eval_before"], summary["eval_after"]) == (0.25, 1.0)
    assert 0 < summary["eval_gain_lower95"] < 0.75


def test_a_good_run_breaks_nothing() -> None:
    expect = ExpectConfig(reward_first_max=0.1, reward_last_min=3.0, accuracy_last_min=1.5, logprob_gap_max=1e-4)
    assert check_expectations(good(), expect) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"produced": 101}, "101 samples were produced, and 100 are accounted for"),
        ({"queued": 4}, "100 samples were produced, and 99"),
        ({"restarts_unasked": 1}, "restarted unasked: 1"),
        ({"digest_ok": False}, "digest"),
        ({"steps": 0}, "no step was trained"),
        ({"checkpoints_failed": 2, "checkpoint_error": "disk full"}, "checkpoints not saved: 2; disk full"),
        ({"dumps_failed": 1, "dump_error": "disk full"}, "dumps not written: 1; disk full"),
    ],
)
def test_account_restarts_digests_and_steps_are_always_checked(changes: dict[str, Any], said: str) -> None:
    """behaviour: B2 B14 B16 B34 B47"""
    (problem,) = check_expectations(good(**changes), ExpectConfig())
    assert said in problem


@pytest.mark.parametrize(
    ("expect", "changes", "said"),
    [
        ({"reward_first_max": 0.1}, {"reward_first": 0.2}, "reward_first is 0.2; expected at most 0.1"),
        ({"reward_last_min": 0.9}, {"reward_last": 0.8}, "reward_last is 0.8; expected at least 0.9"),
        ({"accuracy_last_min": 0.9}, {"accuracy_last": None}, "accuracy_last was not measured"),
        ({"eval_gain_lower95_min": 0.0}, {"eval_gain_lower95": -0.1}, "eval_gain_lower95 is -0.1"),
        ({"logprob_gap_max": 1e-4}, {"logprob_gap_max": 2e-4}, "logprob_gap_max is 0.0002; expected at most 0.0001"),
        ({"logprob_gap_mean": 0.05}, {"logprob_gap_mean": 0.06}, "logprob_gap_mean is 0.06; expected at most 0.05"),
        ({"logprob_gap_max": 1e-4}, {"logprob_gap_max": float("nan")}, "logprob_gap_max is nan"),
    ],
)
def test_each_configured_bound_is_checked(expect: dict[str, float], changes: dict[str, Any], said: str) -> None:
    (problem,) = check_expectations(good(**changes), ExpectConfig(**expect))
    assert said in problem

"""The simulated pipeline: its time model by hand, and the policies that it runs."""

from __future__ import annotations

from typing import Any

import pytest

from relax.config.run import RunConfig
from relax.config.simulation import EngineModelConfig, SimulationConfig
from relax.simulation.clock import Clock
from relax.simulation.engine import Sample, SimEngine
from relax.simulation.turns import Lengths, colocated, fitted
from services.simulation.pipeline import Pipeline, outcome

PLAIN = EngineModelConfig(step_s=0.01, sequence_s=0.001, cached_token_s=0.0, prefill_token_s=0.1, slots=8, swap_s=2.0)


def run_config(**fields: Any) -> RunConfig:
    values: dict[str, Any] = {
        "steps": 12,
        "groups_per_step": 8,
        "group_size": 4,
        "max_prompt_tokens": 64,
        "max_response_tokens": 4096,
        "group_deadline_s": 1e6,
    }
    return RunConfig(**{**values, **fields})


def profile(**fields: Any) -> SimulationConfig:
    values: dict[str, Any] = {
        "gpus": 4,
        "rollout_gpus": 2,
        "lengths": {"mean_tokens": 800, "sigma": 0.5},
        "trainer": {"token_gpu_s": 4e-4},
    }
    return SimulationConfig.model_validate({**values, **fields})


def test_events_of_one_time_run_in_their_order_and_a_cancelled_one_does_not() -> None:
    clock, seen = Clock(), list[str]()
    clock.after(2.0, lambda: seen.append("late"))
    clock.after(1.0, lambda: seen.append("first"))
    clock.after(1.0, lambda: seen.append("second"))
    clock.cancel(clock.after(1.0, lambda: seen.append("never")))
    clock.run(lambda: len(seen) == 3)
    assert (seen, clock.now) == (["first", "second", "late"], 2.0)


def test_a_decode_step_gives_every_running_sequence_a_token() -> None:
    """Two sequences: 12 ms a step, after 1 s of prefill. The short one ends after 10 steps; the other then has 11 ms a
    step for its last 10."""
    clock, ended = Clock(), list[tuple[int, float]]()
    engine = SimEngine(clock, PLAIN, lambda sample: ended.append((sample.k, clock.now)))
    engine.start([Sample("g", 0, 10, 4), Sample("g", 1, 20, 4)], prompt_tokens=10)
    clock.run(lambda: len(ended) == 2)
    assert ended == [(0, pytest.approx(1 + 10 * 0.012)), (1, pytest.approx(1 + 10 * 0.012 + 10 * 0.011))]


def test_a_swap_stalls_and_splits_the_tokens_by_version() -> None:
    """11 ms a step: after 55 ms five tokens are drawn, then 2 s of stall, then the others by the new version."""
    clock, ended = Clock(), list[Sample]()
    engine = SimEngine(clock, PLAIN, ended.append)
    engine.start([Sample("g", 0, 20, 4)], prompt_tokens=0)
    clock.after(0.055, lambda: engine.take(3))
    clock.run(lambda: bool(ended))
    assert clock.now == pytest.approx(20 * 0.011 + 2.0)
    assert dict(ended[0].tokens_by_version) == {0: pytest.approx(5), 3: pytest.approx(15)}


def test_lengths_are_a_function_of_seed_and_group_with_the_mean_asked_for() -> None:
    run = run_config(seed=5)
    lengths = Lengths(run, profile())
    assert lengths.of_group(3, 4) == Lengths(run, profile()).of_group(3, 4) != lengths.of_group(4, 4)
    drawn = [value for group in range(2000) for value in lengths.of_group(group, 4)]
    assert sum(drawn) / len(drawn) == pytest.approx(800, rel=0.03)
    assert max(drawn) <= 4096


def test_a_colocated_step_is_generation_and_training_one_after_the_other() -> None:
    config = profile(mode="colocate", switch_s=7.0)
    run = run_config(steps=2)
    figures = colocated(run, config)
    for step_s, generated_s, tokens in zip(figures.step_s, figures.trainer_wait_s, figures.tokens, strict=True):
        assert step_s == pytest.approx(generated_s + tokens * 4e-4 / 4 + 1.0 + 7.0)


def test_fitting_meets_the_colocated_figure_and_changes_the_trainer_alone() -> None:
    run, config = run_config(), profile(mode="colocate")
    target = 1.5 * colocated(run, config).mean_step_s(3)
    found = fitted(run, config, target)
    assert colocated(run, found).mean_step_s(3) == pytest.approx(target, rel=1e-3)
    assert found.engine == config.engine and found.lengths == config.lengths
    with pytest.raises(ValueError, match="shorter than its generation"):
        fitted(run, config, 1.0)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_pipeline_trains_every_step_within_the_lag_of_its_policy(staleness: int) -> None:
    """behaviour: B15. The real admission and bus: lag 0 on-policy, at most max_token_lag otherwise."""
    run = run_config(max_staleness=staleness)
    pipeline = Pipeline(run, profile())
    figures = pipeline.run()
    assert len(figures.step_s) == run.steps
    assert max(figures.lags) <= run.token_lag_bound
    stats = pipeline.index.stats(pipeline.clock.now)
    assert stats.account.balanced and stats.account.trained == run.steps * 8 * 4
    assert pipeline.admission.trained == run.steps * 8


def test_overlap_approaches_the_longer_side_and_waiting_shows_which_it_is() -> None:
    """behaviour: B18"""
    run = run_config(max_staleness=1, steps=20)
    bound_by_training = outcome(run, profile(trainer={"token_gpu_s": 4e-3}))
    assert bound_by_training.over_limit == pytest.approx(1.0, abs=0.03)
    assert bound_by_training.trainer_wait_share < 0.01
    bound_by_generation = outcome(run, profile(trainer={"token_gpu_s": 4e-5}))
    # Groups that are being trained are in flight too: with few of them generation has less room meanwhile.
    assert bound_by_generation.over_limit == pytest.approx(1.05, abs=0.07)
    assert bound_by_generation.trainer_wait_share > 0.5


def test_a_simulation_is_a_function_of_its_inputs() -> None:
    run, config = run_config(max_staleness=1), profile()
    first, second = Pipeline(run, config).run(), Pipeline(run, config).run()
    assert first.step_s == second.step_s and first.lags == second.lags

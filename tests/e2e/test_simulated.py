"""The real services, bus, leases and versions around engines and a trainer that only spend time."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from e2e_support import ROOT, Runner

from relax.config.file import load_run_file
from services.simulation.pipeline import Pipeline

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SIM = ROOT / "deploy" / "sim_16xh800.yaml"
WARM = 3


def cluster(**fields: Any) -> str:
    """Two engines and two training GPUs; a step takes some 25 simulated seconds."""
    profile = {
        "gpus": 4,
        "rollout_gpus": 2,
        "lengths": {"mean_tokens": 3500, "sigma": 0.3, "prompt_tokens": 256},
        "engine": {"step_s": 0.0055, "slots": 64},
        "trainer": {"token_gpu_s": 4e-4, "update_s": 1.0, "publish_s": 1.0},
        "warm_steps": WARM,
        **fields,
    }
    return f"run.simulation={profile}"


SIZES = [
    "run.groups_per_step=4",
    "run.group_size=4",
    "rollout.instances=2",
    "rollout.engine={backend: simulated, slots: 64}",
]


def test_step_times_are_those_that_the_simulated_clock_predicts(run: Runner) -> None:
    settings = [*SIZES, cluster(time_scale=4.0), "run.steps=13"]
    config = load_run_file(SIM, settings).run
    assert config.simulation is not None
    predicted_s = Pipeline(config, config.simulation).run().mean_step_s(WARM)
    done = run(*settings, deploy=SIM)
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.summary["produced"] == done.summary["trained"] + done.summary["dropped"] + done.summary["queued"]
    assert done.summary["digest_ok"] and done.summary["logprob_gap_max"] == 0
    assert set(done.summary["engine_versions"].values()) == {13}
    step_s = statistics.fmean(line["step_s"] for line in done.lines("metrics.jsonl")[WARM:]) * 4.0
    assert step_s == pytest.approx(predicted_s, rel=0.15)


def test_failures_of_simulated_engines_are_retried_and_counted(run: Runner) -> None:
    """Half of the requests fail, one retry: a quarter of the samples ends with a reason. behaviour: B16 B39"""
    counters: dict[str, dict[str, float]] = {}

    def during(status: dict[str, Any]) -> None:
        counters.update({view["instance"]: view["counters"] for view in status["roles"] if view["role"] == "instance"})

    quick = cluster(time_scale=100.0, failure_share=0.5)
    settings = [*SIZES, quick, "run.steps=8", "rollout.sample_retries=1", "rollout.min_group_size=1"]
    done = run(*settings, deploy=SIM, during=during)
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.summary["produced"] == done.summary["trained"] + done.summary["dropped"] + done.summary["queued"]
    assert done.summary["steps"] == 8 and done.summary["trained"] < 8 * 16
    failed = sum(one.get("samples_failed", 0.0) for one in counters.values())
    assert 0.1 < failed / (failed + done.summary["trained"]) < 0.45

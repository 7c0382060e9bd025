"""Whole runs: all services, real Ray, real bus, real training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Runner, kill_once

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_run_learns_and_accounts_for_every_sample(run: Runner) -> None:
    """The reward of samples drawn by the engines rises, which proves weight delivery.

    behaviour: B2 B3 B8 B9 B15 B16 B34
    """
    done = run("run.steps=60", "run.max_staleness=1", "actor.checkpoint_every=25")
    assert done.outcome.state == "finished", done.outcome.reason
    summary, metrics, samples = done.summary, done.lines("metrics.jsonl"), done.lines("samples.jsonl")
    assert summary["reward_first"] <= 0.3 and summary["reward_last"] >= 0.9
    assert summary["produced"] == summary["trained"] + summary["dropped"] + summary["queued"]
    assert summary["produced"] == 60 * 8 * 16 == len([s for s in samples if s["purpose"] == "train"])
    assert summary["restarts_unasked"] == 0
    assert summary["digest_ok"] and 0 < summary["logprob_gap_max"] <= 1e-4
    assert set(summary["engine_versions"].values()) == {60}
    assert [line["step"] for line in metrics] == list(range(1, 61))
    assert all(line["version_lag_max"] <= 4 and line["logprob_gap_max"] <= 1e-4 for line in metrics)
    last = [s["reward"] for s in samples[-128:]]
    assert sum(last) / len(last) >= 0.9
    snapshots = [status["bus"] for status in done.seen if status["bus"]]
    assert len(snapshots) > 10
    for bus in snapshots:
        assert bus["produced"] == bus["trained"] + bus["dropped"] + bus["queued"]
    assert (done.folder / "report.html").stat().st_size > 10_000
    assert json.loads((done.folder / "config.json").read_text())["actor"]["optim"]["lr"] == 0.003
    assert list((done.folder / "checkpoints").glob("ckpt-*-step-00000060/manifest.json"))


@pytest.mark.parametrize(
    "fault", ["actor.optim.lr=0", "run.faults=[skip_adoption]"], ids=["learning rate 0", "adoption only claimed"]
)
def test_the_canary_stays_low_when_nothing_reaches_the_engines(run: Runner, fault: str) -> None:
    """behaviour: B3"""
    done = run("run.steps=40", fault)
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.summary["reward_last"] < 0.5


def test_damaged_weights_are_never_adopted(run: Runner) -> None:
    """behaviour: B2 B4"""
    failures: list[dict[str, Any]] = []

    def during(status: dict[str, Any]) -> None:
        failures.extend(
            view for view in status["roles"] if view["role"] == "instance" and view["counters"].get("adoptions_failed")
        )

    done = run("run.steps=3", "run.faults=[corrupt_bucket]", "controller.start_deadline_s=90", during=during)
    assert done.outcome.state == "failed"
    assert "a rollout instance with weights" in (done.outcome.reason or "") and "digest" in (done.outcome.reason or "")
    assert failures and all(view["version"] is None for view in failures)


def test_staleness_0_is_exactly_on_policy(run: Runner) -> None:
    """behaviour: B15"""
    done = run("run.steps=8", "run.max_staleness=0")
    assert done.outcome.state == "finished", done.outcome.reason
    assert set(done.summary["lag_histogram"]) == {"0"}


def test_an_unasked_restart_is_counted_and_breaks_the_acceptance(run: Runner) -> None:
    """behaviour: B34"""
    done = run("run.steps=25", during=kill_once(lambda status: status["step"] >= 3, "reward"))
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.summary["restarts_unasked"] == 1
    assert any("restart" in violation for violation in done.outcome.violations)
    assert done.summary["produced"] == done.summary["trained"] + done.summary["dropped"] + done.summary["queued"]


def test_a_reward_that_always_fails_stops_the_run_with_the_reason(run: Runner, tmp_path: Path) -> None:
    """behaviour: B20"""
    recipe = tmp_path / "broken_reward.py"
    recipe.write_text("def score(response, label, metadata):\n    return float('nan')\n")
    done = run("run.steps=20", f"reward.parts=[{{name: '{recipe}:score'}}]")
    assert done.outcome.state == "failed"
    assert "reward calls failed" in (done.outcome.reason or "") and "nan" in (done.outcome.reason or "")


def test_a_log_prob_gap_above_the_limit_stops_the_run(run: Runner) -> None:
    """behaviour: B8"""
    done = run("run.steps=20", "run.faults=[skip_adoption]", "controller.logprob_gap_limit=0.001")
    assert done.outcome.state == "failed"
    assert "logprob_gap_limit" in (done.outcome.reason or "")


def test_a_stall_names_who_waits_for_whom(run: Runner) -> None:
    """behaviour: B46"""
    hang = f"rollout.worker={Path(__file__).parent / 'e2e_workers.py'}:NeverAnswers"
    done = run("run.steps=5", hang, "controller.stall_s=5", "controller.stall_stops_run=true")
    assert done.outcome.state == "failed"
    assert "nothing moved for" in (done.outcome.reason or "") and "rollout" in (done.outcome.reason or "")

"""Whole runs: all services, real Ray, real bus, real training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Runner, kill_once

from services.rollout.ledger import Ledger, TerminalState

pytestmark = [pytest.mark.ray]


@pytest.mark.slow
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

    done = run("run.steps=3", "run.faults=[corrupt_bucket]", during=during)
    assert done.outcome.state == "failed"
    assert "could adopt weights" in (done.outcome.reason or "") and "digest" in (done.outcome.reason or "")
    assert failures and all(view["version"] is None for view in failures)


@pytest.mark.slow
def test_weights_that_travel_over_tcp_are_adopted_with_the_trainers_digest_and_learnt_from(
    run: Runner, tmp_path: Path
) -> None:
    """behaviour: B2 B3 B33"""
    shm = tmp_path / "shm"
    shm.mkdir()
    copies: set[str] = set()

    def during(status: dict[str, Any]) -> None:
        copies.update(path.name for path in shm.glob("*.cache"))

    done = run("run.steps=60", "dcs.transport=tcp", f"dcs.shm_dir={shm}", during=during)
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.summary["digest_ok"] and set(done.summary["engine_versions"].values()) == {60}
    assert done.summary["reward_first"] < 0.3 and done.summary["reward_last"] > 0.6
    assert done.summary["restarts_unasked"] == 0
    counters = {view["instance"]: view["counters"] for status in done.seen for view in status["roles"]}
    assert 2 <= counters["dcs"]["tcp_served"] <= 61, "both instances of the node pull a version once"
    assert len(copies) == 1 and list(shm.iterdir()) == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_full_disk_at_a_checkpoint_is_told_and_training_goes_on(
    run: Runner, mount_small_disk: Callable[[Path], None]
) -> None:
    """behaviour: B47"""
    done = run(
        "run.steps=6", "actor.checkpoint_every=2", prepare=lambda folder: mount_small_disk(folder / "checkpoints")
    )
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.summary["steps"] == 6 and done.summary["checkpoints_failed"] == 3
    assert any("checkpoints not saved: 3" in violation for violation in done.outcome.violations)


@pytest.mark.slow
def test_a_reward_that_always_fails_stops_the_run_with_the_reason(run: Runner, tmp_path: Path) -> None:
    """behaviour: B20"""
    recipe = tmp_path / "broken_reward.py"
    recipe.write_text("def score(response, label, metadata):\n    return float('nan')\n")
    done = run("run.steps=20", f"reward.parts=[{{name: '{recipe}:score'}}]")
    assert done.outcome.state == "failed"
    assert "reward calls failed" in (done.outcome.reason or "") and "nan" in (done.outcome.reason or "")


@pytest.mark.slow
def test_a_log_prob_gap_above_the_limit_stops_the_run(run: Runner) -> None:
    """behaviour: B8"""
    done = run("run.steps=20", "run.faults=[skip_adoption]", "controller.logprob_gap_limit=0.001")
    assert done.outcome.state == "failed"
    assert "logprob_gap_limit" in (done.outcome.reason or "")


@pytest.mark.slow
def test_a_stall_names_who_waits_for_whom(run: Runner) -> None:
    """behaviour: B46"""
    hang = f"rollout.worker={Path(__file__).parent / 'e2e_workers.py'}:NeverAnswers"
    done = run("run.steps=5", hang, "controller.stall_s=5", "controller.stall_stops_run=true")
    assert done.outcome.state == "failed"
    assert "nothing moved for" in (done.outcome.reason or "") and "rollout" in (done.outcome.reason or "")


def test_a_task_without_signal_ends_with_its_name_and_its_prompts_count_as_consumed(run: Runner) -> None:
    """Rewards differ within each group and no answer is right: the filter must read the accuracy.

    behaviour: B28 B29
    """
    band = "rollout.filter={kind: accuracy_band, low: 0.1, max_filtered_prompts: 40}"
    done = run("run.steps=20", "rollout.data.task=reverse", "rollout.data.params={length: 3}", band)
    assert done.outcome.state == "failed"
    reason = done.outcome.reason or ""
    assert "reverse" in reason and "40 prompts in a row were filtered by accuracy_band" in reason, reason
    rewards = [sample["reward"] for sample in done.lines("samples.jsonl")]
    assert len(set(rewards)) > 1 and done.summary["steps"] == 0
    ledger = Ledger(done.folder / "ledger.sqlite", read_only=True)
    counts, filtered = ledger.counts(), ledger.terminals(TerminalState.FILTERED)
    assert counts.filtered == len({terminal.group_id for terminal in filtered}) >= 40
    assert counts.trained == 0 and ledger.last_cursor()["position"] == counts.admitted


@pytest.mark.slow
def test_an_engine_that_was_killed_takes_weights_anew_and_agrees_with_the_trainer_again(run: Runner) -> None:
    """The gap is measured at every adoption of every engine, on the probe at equal version.

    behaviour: B6
    """
    steps = 160  # its replica is back long before the last one
    done = run(f"run.steps={steps}", during=kill_once(lambda status: status["step"] >= 3, "rollout-0"))
    assert done.outcome.state == "finished", done.outcome.reason
    [engine] = [view for view in done.seen[-1]["roles"] if view["instance"] == "rollout-0"]
    assert engine["restarts"] == 1 and engine["counters"]["adoptions"] > 1
    assert set(done.summary["engine_versions"].values()) == {steps}
    assert 0 < done.summary["logprob_gap_max"] <= 1e-4
    assert all(line["logprob_gap_max"] <= 1e-4 for line in done.lines("metrics.jsonl"))
    assert done.summary["produced"] == done.summary["trained"] + done.summary["dropped"] + done.summary["queued"]


@pytest.mark.slow
def test_a_role_that_cannot_come_up_fails_the_run_and_leaves_no_weights_in_memory(run: Runner, tmp_path: Path) -> None:
    """`relax check` refuses this file before anything starts; here the manager finds out.

    behaviour: B33
    """
    shm = tmp_path / "shm"
    shm.mkdir()
    done = run("rollout.eval={prompts: 1000}", f"dcs.shm_dir={shm}")
    assert done.outcome.state == "failed" and "the evaluation set wants 1000 prompts" in (done.outcome.reason or "")
    assert list(shm.iterdir()) == []

"""Jobs other than GRPO on the same services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e_support import ROOT, Finished, Runner, kill_once

from relax.dump.files import find_dumps, read_dump
from relax.dump.replay import compare_replay, replay

pytestmark = [pytest.mark.ray]


def replays_as_recorded(done: Finished, step: int) -> None:
    folder = find_dumps(done.folder)[step]
    dump = read_dump(folder)
    line = done.lines("metrics.jsonl")[step - 1]
    assert (dump.result["loss"], dump.result["grad_norm"]) == (line["loss"], line["grad_norm"])
    compared = compare_replay(dump, replay(dump, folder, base=ROOT), 1e-6)
    assert [field for field in compared if not field.equal] == []


@pytest.mark.slow
def test_supervised_training_reads_the_answers_that_the_data_holds(run: Runner) -> None:
    done = run("run.steps=60", "controller.expect={last_max: {nll: 1.0}}", deploy=ROOT / "deploy" / "tiny_sft_cpu.yaml")
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.outcome.violations == []
    metrics = done.lines("metrics.jsonl")
    assert metrics[0]["nll"] > 2 and metrics[-1]["nll"] < 1.0 and "reward_mean" not in metrics[0]
    assert done.summary["produced"] == done.summary["trained"] == 60 * 128
    assert (done.folder / "export" / "model.safetensors").exists()


def test_preferences_are_learnt_from_pairs(run: Runner) -> None:
    done = run("run.steps=40", "actor.dump.steps=40", deploy=ROOT / "deploy" / "tiny_dpo_cpu.yaml")
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.outcome.violations == []
    metrics = done.lines("metrics.jsonl")
    assert metrics[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "at the reference the margin is 0"
    assert done.summary["metrics_last"]["preference_margin"] > 0.1
    replays_as_recorded(done, 40)


@pytest.mark.slow
def test_ppo_with_a_critic_learns_off_policy(run: Runner) -> None:
    """Asynchronous, two updates a step, with truncated importance weights against the rollout policy."""
    algorithm = (
        "{name: ppo, mini_batches: 2, behaviour: trainer, entropy_coef: 0.03, gae: {lam: 1.0},"
        " correction: {weight: token, cap: 2.0}, kl: {coef: 0.001}}"
    )
    done = run(
        "run.steps=60", f"actor.algorithm={algorithm}", "actor.critic={optim: {lr: 0.003}}", "actor.dump.steps=30"
    )
    assert done.outcome.state == "finished", done.outcome.reason
    metrics = done.lines("metrics.jsonl")
    assert all(line["updates"] == 2 for line in metrics)
    assert done.summary["reward_first"] < 0.3 and done.summary["reward_last"] > 0.6
    last = metrics[-10:]
    error = sum(line["value_error"] for line in last)
    of_zero = sum(line["reward_mean"] ** 2 + line["reward_std"] ** 2 for line in last)
    assert error < 0.5 * of_zero, "the critic predicts far better than one that says 0 for every token"
    assert "1" in done.summary["lag_histogram"], "off-policy"
    replays_as_recorded(done, 30)


@pytest.mark.slow
def test_a_student_is_distilled_from_the_teacher_of_each_task(run: Runner, tmp_path: Path) -> None:
    """A teacher that knows how to copy, and one that knows nothing: which rows go to which shows in the samples."""
    copy = "rollout.data={kind: toy, task: copy, params: {length: 1}}"
    teacher = run("run.steps=60", copy, "controller.expect={}", deploy=ROOT / "deploy" / "tiny_sft_cpu.yaml")
    assert teacher.outcome.state == "finished", teacher.outcome.reason
    knows = tmp_path / "knows"
    (teacher.folder / "export").rename(knows)
    done = run(
        "run.steps=40",
        "actor.algorithm={name: opd, distill: {form: topk_reverse}}",
        "run.teacher_top_k=4",
        "ref.reference=false",
        f"ref.teachers={{copying: {{path: {knows}}}, other: {{path: {knows}}}}}",
        "rollout.teachers={routes: {copy: copying}, default: other}",
    )
    assert done.outcome.state == "finished", done.outcome.reason
    metrics = done.lines("metrics.jsonl")
    assert metrics[0]["teacher_topk_kl"] > 1 and metrics[-1]["teacher_topk_kl"] < 0.3
    assert done.summary["reward_first"] < 0.3 and done.summary["reward_last"] > 0.8, "nothing but the teacher taught it"
    rows = {name: time["work_s"] for name, time in done.summary["role_time"].items()}
    assert "teacher" in rows
    by_teacher = {view["instance"]: view["counters"].get("rows", 0) for view in done.seen[-1]["roles"]}
    assert by_teacher["teacher-copying"] > 0 and by_teacher["teacher-other"] == 0


@pytest.mark.slow
def test_training_is_evaluated_on_pinned_versions_while_it_goes_on(run: Runner) -> None:
    done = run(
        "run.steps=30",
        "rollout.instances=1",
        "rollout.eval={prompts: 10, every: 10, instances: 1, samples: 4, temperature: 1.0}",
    )
    assert done.outcome.state == "finished", done.outcome.reason
    evals = {line["when"]: line for line in done.lines("evals.jsonl")}
    assert {"before", "after"} < set(evals) and len(evals) >= 4
    assert evals["before"]["version"] == 0 and evals["after"]["version"] == 30
    for line in evals.values():
        assert line["pass_at"]["1"] <= line["pass_at"]["2"] <= line["pass_at"]["4"]
    held_out = [s for s in done.lines("samples.jsonl") if s["purpose"] == "eval"]
    assert len(held_out) == 40 * len(evals)
    assert {s["version"] for s in held_out} == {line["version"] for line in evals.values()}, "one version a round"
    views = {view["instance"]: view["counters"] for status in done.seen for view in status["roles"]}
    assert views["rollout-eval-0"]["samples"] == len(held_out)
    assert views["rollout-0"]["samples"] == done.summary["produced"], "training instances trained, and nothing else"


@pytest.mark.slow
def test_an_evaluator_that_was_killed_in_the_middle_of_a_round_answers_the_rest_at_the_rounds_version(
    run: Runner,
) -> None:
    """What the dead one held is delivered again, and its successor takes the version that the round has pinned."""
    each = 100 * 16

    def half_way(status: dict[str, Any]) -> bool:
        counts = [view["counters"] for view in status["roles"] if view["instance"] == "rollout-eval-0"]
        return bool(counts) and each < counts[0].get("samples", 0) < 2 * each - 400

    done = run(
        "run.steps=120",
        "rollout.data.params={length: 3}",  # of one digit there are not as many prompts
        "rollout.instances=1",
        "rollout.eval={prompts: 100, every: 15, instances: 1, samples: 16, temperature: 1.0}",
        "controller.heartbeat_s=0.2",
        during=kill_once(half_way, "rollout-eval-0"),
    )
    assert done.outcome.state == "finished", done.outcome.reason
    [evaluator] = [view for view in done.seen[-1]["roles"] if view["instance"] == "rollout-eval-0"]
    assert evaluator["restarts"] == 1, "it was killed in a round, and came back"
    evals = done.lines("evals.jsonl")
    assert len(evals) >= 3 and len({line["when"] for line in evals}) == len(evals)
    held_out = [s for s in done.lines("samples.jsonl") if s["purpose"] == "eval"]
    assert len({s["row_id"] for s in held_out}) == each * len(evals), "every round is whole"
    assert {s["version"] for s in held_out} == {line["version"] for line in evals}, "one version a round"

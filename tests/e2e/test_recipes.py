"""Recipes with own workers, data, rewards and advantages, on all services."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_support import ROOT, Finished, Runner

from relax.cli.recipe import new_recipe
from relax.dump.diff import diff
from relax.dump.files import find_dumps, read_dump, step_folder, write_dump
from relax.dump.replay import compare_replay, replay

pytestmark = [pytest.mark.ray]


def test_a_two_turn_tool_task_runs_its_rewards_see_both_turns_and_its_dumps_replay(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B22. What the policy sampled is the call and the answer; the tool's output is context."""
    recipe = ROOT / "recipes" / "calculator" / "config.yaml"
    done = run("run.steps=8", "controller.expect={}", "actor.dump.steps=2,8", deploy=recipe)
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.summary["produced"] == done.summary["trained"] == 8 * 256
    for sample in done.lines("samples.jsonl"):
        assert set(sample["parts"]) == {"answer", "answer_overlap", "call_overlap"}
        assert len(sample["response"]) <= 3, "the answer alone, not the call"
        assert "###" in sample["prompt"] or sample["parts"]["call_overlap"] > 0, "the tool answered what was asked"
    monkeypatch.chdir(ROOT)
    _dumps_are_those_of_the_run_and_replay(done)


def _dumps_are_those_of_the_run_and_replay(done: Finished) -> None:
    """Everything that the step read and computed, computed again from the files alone, and a fault in them found."""
    found = find_dumps(done.folder)
    assert list(found) == [2, 8]
    dump, line, drawn = read_dump(found[8]), done.lines("metrics.jsonl")[7], done.lines("samples.jsonl")
    assert dump.result.items() <= line.items() | {("n_tokens", dump.result["n_tokens"]), ("n_rows", 256.0)}
    samples = {sample["row_id"]: sample for sample in drawn}
    for row_id, row in dump.rows.items():
        assert row.values["reward"] == pytest.approx(samples[row_id]["reward"])
        assert row.values["response_text"] == samples[row_id]["response"]
        assert row.values["prompt"]["label"] == samples[row_id]["label"]
    again = replay(dump, found[8], base=ROOT)
    assert max(field.largest for field in compare_replay(dump, again, 1e-6)) <= 1e-6
    assert again.digests == dump.digests

    copy = shutil.copytree(done.folder / "dumps", done.folder.parent / "dumps")
    assert diff(done.folder, copy, 0.0).first is None
    row_id = sorted(dump.rows)[100]
    row = dump.rows[row_id]
    values = {**row.values, "reward": row.values["reward"] + 0.5}
    other = replace(dump, rows={**dump.rows, row_id: replace(row, values=values)})
    write_dump(other, step_folder(copy, 8))
    parted = diff(done.folder, copy, 1e-6)
    for name, first in (
        ("diff", parted.first),
        ("replay", next(f for f in compare_replay(other, replay(other, found[8], base=ROOT), 1e-6) if not f.equal)),
    ):
        assert first is not None and first.field == "reward" and first.first is not None, name
        assert first.first.row_id == row_id and first.differing == 1 and first.first.gap == pytest.approx(0.5), name
    assert parted.step == 8


@pytest.mark.slow
def test_an_own_advantage_with_an_own_reward_learns(run: Runner) -> None:
    done = run("run.steps=60", "controller.expect={}", deploy=ROOT / "recipes" / "ranks" / "config.yaml")
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.summary["reward_first"] < 0.5 and done.summary["reward_last"] > 0.8


@pytest.mark.slow
def test_a_new_recipe_runs_as_it_is(run: Runner, tmp_path: Path) -> None:
    folder = new_recipe("fresh", tmp_path)
    done = run("run.steps=3", deploy=folder / "config.yaml")
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.outcome.violations == []

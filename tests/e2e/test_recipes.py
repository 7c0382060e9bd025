"""Recipes with own workers, data, rewards and advantages, on all services."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_support import ROOT, Runner

from relax.cli.recipe import new_recipe

pytestmark = [pytest.mark.ray]


def test_a_two_turn_tool_task_runs_and_its_rewards_see_both_turns(run: Runner) -> None:
    """behaviour: B22. What the policy sampled is the call and the answer; the tool's output is context."""
    done = run("run.steps=8", "controller.expect={}", deploy=ROOT / "recipes" / "calculator" / "config.yaml")
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.summary["produced"] == done.summary["trained"] == 8 * 256
    for sample in done.lines("samples.jsonl"):
        assert set(sample["parts"]) == {"answer", "answer_overlap", "call_overlap"}
        assert len(sample["response"]) <= 3, "the answer alone, not the call"
        assert "###" in sample["prompt"] or sample["parts"]["call_overlap"] > 0, "the tool answered what was asked"


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

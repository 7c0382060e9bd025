"""Spans and time splits of a whole run."""

from __future__ import annotations

import json

import pytest
from e2e_support import Runner
from e2e_traces import broken_ways, missing_times, overbooked, trace_events, untraced_roles
from typer.testing import CliRunner

from relax.cli.main import app

pytestmark = [pytest.mark.ray]


@pytest.mark.slow
def test_every_trained_sample_can_be_followed_through_all_roles(run: Runner) -> None:
    problems: list[str] = []
    done = run("run.steps=4", "run.trace_share=1", during=lambda status: problems.extend(overbooked(status)))
    assert done.outcome.state == "finished", done.outcome.reason
    samples = {line["row_id"].rpartition("/")[0] for line in done.lines("samples.jsonl")}
    assert len(samples) == done.summary["trained"] == 4 * 8 * 16
    problems += broken_ways(done.folder, samples)[:3] + untraced_roles(done.folder, steps=4)
    assert problems + missing_times(done.summary) == []
    events = trace_events(done.folder)
    assert {e["name"] for e in events if e.get("cat") == "sample"} == samples
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rollout-0",
        "rollout-1",
        "reward",
        "ref",
        "actor",
        "dcs",
    }
    third = CliRunner().invoke(app, ["samples", str(done.folder), "--step", "3", "-n", "0", "--json"])
    assert len([json.loads(line) for line in third.stdout.splitlines()]) == 8 * 16


@pytest.mark.slow
def test_a_share_of_0_writes_no_spans(run: Runner) -> None:
    done = run("run.steps=2", "run.trace_share=0")
    assert done.outcome.state == "finished", done.outcome.reason
    assert not (done.folder / "traces").exists()

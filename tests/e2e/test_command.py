"""`relax run` as a user starts it: one process that learns, tells, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from e2e_support import EASY, RunCommand
from e2e_traces import broken_ways, missing_times

from relax.telemetry.trace import Tracer
from relax.types import group_of

pytestmark = [pytest.mark.ray]

Start = Callable[..., RunCommand]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(*overrides) -> the running command."""
    commands: list[RunCommand] = []

    def begin(*overrides: str) -> RunCommand:
        commands.append(RunCommand(tmp_path, [*EASY, *overrides]))
        return commands[-1]

    yield begin
    for command in commands:
        command.end()


def test_one_command_learns_accounts_for_every_sample_and_leaves_nothing(start: Start) -> None:
    """The reward of samples drawn by the engines rises, which proves weight delivery.

    behaviour: B2 B3 B8 B9 B15 B16 B34 B41
    """
    expect = "controller.expect={reward_first_max: 0.3, reward_last_min: 0.9, accuracy_last_min: 0.7}"
    settled = "actor.optim.schedule=cosine"  # at a constant rate a digit is now and then unlearnt for some steps
    command = start("run.steps=110", "run.max_staleness=1", "actor.checkpoint_every=25", settled, expect)
    snapshots, memory = [], []
    while command.running():
        status = command.status()
        if status and status["bus"]:
            snapshots.append(status["bus"])
        if status and status["step"] >= 3 and not memory:
            memory.append(command.memory_bytes())
            log = subprocess.run(
                [sys.executable, "-m", "relax.cli.main", "logs", "controller", str(command.folder)],
                capture_output=True,
                timeout=60,
            )
            assert log.returncode == 0 and b" in " + bytes(command.folder) in log.stdout, log
        time.sleep(1.0)  # the pace of the snapshots; the command's own end is awaited
    assert command.exit_code == 0, command.output
    assert "step 110/110" in command.output and "report.html" in command.output

    summary, metrics, samples = command.summary, command.lines("metrics.jsonl"), command.lines("samples.jsonl")
    assert summary["reward_first"] <= 0.3 and summary["reward_last"] >= 0.9
    assert summary["produced"] == summary["trained"] + summary["dropped"] + summary["queued"]
    assert summary["produced"] == 110 * 8 * 16 == len([s for s in samples if s["purpose"] == "train"])
    assert summary["restarts_unasked"] == 0
    assert summary["digest_ok"] and 0 < summary["logprob_gap_max"] <= 1e-4
    assert set(summary["engine_versions"].values()) == {110}
    assert [line["step"] for line in metrics] == list(range(1, 111))
    assert all(line["version_lag_max"] <= 4 and line["logprob_gap_max"] <= 1e-4 for line in metrics)
    last = [s["reward"] for s in samples[-4 * 8 * 16 :]]  # of about the steps that reward_last is the mean of
    assert abs(sum(last) / len(last) - summary["reward_last"]) < 0.1
    tracer = Tracer(json.loads((command.folder / "config.json").read_text())["run"]["trace_share"], "any", "any")
    traced = {s["row_id"].rpartition("/")[0] for s in samples if tracer.traced(group_of(s["row_id"]))}
    assert len(traced) > 1000 and broken_ways(command.folder, traced)[:3] == []
    assert missing_times(summary) == []
    assert memory[0] < 4e9
    assert len(snapshots) > 10
    for bus in snapshots:
        assert bus["produced"] == bus["trained"] + bus["dropped"] + bus["queued"]
    assert (command.folder / "report.html").stat().st_size > 10_000
    assert json.loads((command.folder / "config.json").read_text())["actor"]["optim"]["lr"] == 0.003
    assert list((command.folder / "checkpoints").glob("ckpt-*-step-00000110/manifest.json"))
    assert command.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_nothing_and_a_second_signal_changes_nothing(
    start: Start, number: signal.Signals
) -> None:
    """behaviour: B33"""
    command = start("run.steps=1000")
    command.wait_for(lambda status: status["step"] >= 3)
    command.process.send_signal(number)
    command.wait_for_output("Stopping the services")
    command.process.send_signal(number)
    command.process.wait(120)
    assert command.exit_code == 130, command.output
    assert "interrupted: everything was stopped" in command.output
    assert command.left_behind() == []


@pytest.mark.slow
def test_an_interrupt_while_the_services_come_up_leaves_nothing(start: Start) -> None:
    """behaviour: B33"""
    command = start("run.steps=1000")
    command.wait_for_output("Deploying the services")
    command.process.send_signal(signal.SIGINT)
    command.process.wait(120)
    assert command.exit_code == 130, command.output
    assert command.left_behind() == []


@pytest.mark.slow
def test_host_memory_does_not_grow_with_the_steps(start: Start) -> None:
    """The slope over the last 150 of 220 steps, in which a run of this size handles 19200 samples.

    behaviour: B36
    """
    command = start("run.steps=220", "rollout.data.task=reverse", "rollout.data.params={length: 3}")
    seen: dict[int, int] = {}
    while command.running():
        status = command.status()
        step = status["step"] if status else 0
        if 70 <= step < 220 and step not in seen:
            seen[step] = command.memory_bytes()
        time.sleep(0.5)  # the pace of the samples; the command's own end is awaited
    assert command.exit_code is not None and len(seen) > 20, command.output
    slope = float(np.polyfit(list(seen), list(seen.values()), 1)[0])
    assert abs(slope) * 150 < 0.01 * statistics.fmean(seen.values()), f"{slope / 1e3:.0f} kB a step: {seen}"

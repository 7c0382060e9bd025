"""A run that ended too early goes on in its folder, and comes to what an unbroken one comes to."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import EASY, RunCommand

from relax.checkpoint.manifest import MANIFEST_NAME
from relax.checkpoint.store import CheckpointStore
from services.rollout.ledger import Ledger, TerminalState

pytestmark = [pytest.mark.ray]

GROUPS, EPOCH, EPOCHS = 8, 160, 3
STEPS_PER_EPOCH, LAST_STEP = EPOCH // GROUPS, EPOCHS * EPOCH // GROUPS
FINITE = [
    *EASY,
    f"rollout.data.size={EPOCH}",
    f"rollout.data.epochs={EPOCHS}",
    "run.steps=1000",
    "controller.expect={}",
]
ALL_GROUPS = {f"copy:{epoch}:{index}" for epoch in range(EPOCHS) for index in range(EPOCH)}
Begin = Callable[..., RunCommand]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """begin(*overrides, resume=False) -> the running command; all of one test share their run folder."""
    commands: list[RunCommand] = []

    def start(*overrides: str, resume: bool = False) -> RunCommand:
        commands.append(RunCommand(tmp_path, list(overrides), resume=resume))
        return commands[-1]

    yield start
    for command in commands:
        command.end()


def finished(command: RunCommand) -> RunCommand:
    command.process.wait(300)
    assert command.exit_code == 0, command.output
    return command


def killed(command: RunCommand, at_step: int) -> RunCommand:
    command.wait_for(lambda status: status["step"] >= at_step)
    command.process.send_signal(signal.SIGKILL)
    command.process.wait(30)
    assert command.left_behind(30.0) == []
    return command


def check_trained_once(command: RunCommand, steps: int) -> None:
    """Each step has its groups, each group is in one, and the metrics have each step once (B12)."""
    with Ledger(command.folder / "ledger.sqlite", read_only=True) as ledger:
        trained = ledger.terminals(TerminalState.TRAINED)
        counts = ledger.counts()
    assert Counter(terminal.step for terminal in trained) == {step: GROUPS for step in range(1, steps + 1)}
    assert len({terminal.group_id for terminal in trained}) == steps * GROUPS == counts.trained == counts.admitted
    records = command.lines("metrics.jsonl")
    assert [int(record["step"]) for record in records] == list(range(1, steps + 1))
    summary = command.summary
    assert summary["produced"] == summary["trained"] + summary["dropped"] + summary["queued"] == steps * GROUPS * 16
    assert summary["steps"] == steps and summary["reward_first"] == records[0]["reward_mean"]


@pytest.mark.parametrize(
    "torn",
    [
        pytest.param(False, id="on an epoch border", marks=pytest.mark.slow),
        pytest.param(True, id="behind a torn checkpoint"),
    ],
)
def test_a_killed_run_trains_all_prompts_as_if_it_had_not_been(begin: Begin, torn: bool) -> None:
    """The first epoch ends with step 20, of which there is a checkpoint; torn, that of step 10 counts. The run goes on
    with one instance in place of two, and another micro-batch size.

    behaviour: B12 B13
    """
    command = killed(begin(*FINITE, "actor.checkpoint_every=10"), STEPS_PER_EPOCH + 3)
    store = CheckpointStore(command.folder / "checkpoints")
    saved = {manifest.step: manifest for manifest in store.scan().whole}
    newest = max(saved)
    assert newest >= STEPS_PER_EPOCH
    if torn:
        (store.folder(saved[newest]) / MANIFEST_NAME).unlink()
    expected = newest - 10 if torn else newest
    with Ledger(command.folder / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.trained_through > expected
    rewards = [record["reward_mean"] for record in command.lines("metrics.jsonl")]

    resumed = finished(begin("rollout.instances=1", "actor.micro_batch_tokens=256", resume=True))
    output = " ".join(resumed.output.split())
    assert f"going on from step {expected} of 1000; steps {expected + 1} to" in output
    assert "changed: rollout.instances: 2 -> 1" in output
    assert ("ignoring torn checkpoint" in output) is torn
    check_trained_once(resumed, LAST_STEP)
    with Ledger(resumed.folder / "ledger.sqlite", read_only=True) as ledger:
        assert {terminal.group_id for terminal in ledger.terminals()} == ALL_GROUPS
    kept = [record["reward_mean"] for record in resumed.lines("metrics.jsonl")][:expected]
    assert kept == rewards[:expected], "what the checkpoint covers was not trained again"
    assert list(resumed.shm.iterdir()) == []


def test_a_stopped_run_goes_on_exactly_and_a_complete_one_says_so(begin: Begin) -> None:
    """A clean stop saves the last step, so nothing is trained again and versions go on. Then: nothing is left, exit 0;
    with more steps it goes on once more.

    behaviour: B10 B12 B14
    """
    command = begin(*EASY, "controller.expect={}", "run.steps=1000")
    command.wait_for(lambda status: status["step"] >= 8)
    command.stop()
    at = int(command.lines("metrics.jsonl")[-1]["step"])
    assert 8 <= at < 1000 and max(newest_versions(command).values()) <= at

    last = at + 12
    resumed = begin(f"run.steps={last}", resume=True)
    seen: list[int] = []
    while resumed.running():
        status = resumed.status()
        seen += [] if status is None else [view["version"] for view in status["roles"] if view["version"] is not None]
        time.sleep(0.2)  # the pace of the looks; the command's own end is awaited
    finished(resumed)
    assert f"going on from step {at} of {last}\n" in resumed.output, "no step is trained again"
    check_trained_once(resumed, last)
    with Ledger(resumed.folder / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.lineage == 0
    assert seen and min(seen) >= at, "the counter goes on: nobody sees a smaller version than before"
    assert set(newest_versions(resumed).values()) == {last}
    records = resumed.lines("metrics.jsonl")
    assert [int(record["version"]) for record in records] == list(range(1, last + 1))

    before = (resumed.folder / "metrics.jsonl").read_bytes()
    complete = begin(resume=True)
    complete.process.wait(120)
    assert complete.exit_code == 0 and f"the run is complete: {last} steps are trained" in complete.output
    assert (resumed.folder / "metrics.jsonl").read_bytes() == before

    longer = finished(begin(f"run.steps={last + 3}", resume=True))
    check_trained_once(longer, last + 3)


def newest_versions(command: RunCommand) -> dict[str, Any]:
    versions: dict[str, Any] = command.summary["engine_versions"]
    return versions

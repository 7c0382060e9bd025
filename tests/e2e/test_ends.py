"""However a run ends, nothing of it is left: no process, no port, no shared memory, no folder of Ray."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_support import EASY, RunCommand

from relax.checkpoint.store import CheckpointStore
from services.rollout.ledger import Ledger

pytestmark = [pytest.mark.ray]

WITHIN_S = 30.0
"""What a run may leave for as long as that (B33)."""
Start = Callable[..., RunCommand]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(*overrides) -> the running command."""
    commands: list[RunCommand] = []

    def begin(*overrides: str) -> RunCommand:
        commands.append(RunCommand(tmp_path, [*EASY, "controller.expect={}", *overrides]))
        return commands[-1]

    yield begin
    for command in commands:
        command.end()


def begun(command: RunCommand) -> RunCommand:
    """It has trained and published, so everything that could be left is there."""
    command.wait_for(lambda status: status["step"] >= 3)
    assert command.running() and any(command.shm.iterdir())
    command.note_ports()
    return command


def test_a_driver_that_is_killed_leaves_nothing(start: Start) -> None:
    """behaviour: B33"""
    command = begun(start("run.steps=1000"))
    command.process.send_signal(signal.SIGKILL)
    command.process.wait(WITHIN_S)
    assert command.left_behind(WITHIN_S) == []
    told = (command.folder / "logs" / "guardian.log").read_text()
    assert "the driver is gone: ended" in told
    assert list((command.folder / "logs").glob("replica_actor_*")), "the logs are kept"


@pytest.mark.slow
def test_a_driver_that_is_killed_while_ray_comes_up_leaves_nothing(start: Start) -> None:
    """behaviour: B33"""
    command = start("run.steps=1000")
    command.wait_for_output("Deploying the services")
    command.process.send_signal(signal.SIGKILL)
    command.process.wait(WITHIN_S)
    assert command.left_behind(WITHIN_S) == []


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing_but_its_last_step(start: Start) -> None:
    """The whole process group gets the signal, as from a terminal. What was trained is in a checkpoint, and the ledger
    is at the same step.

    behaviour: B33
    """
    command = begun(start("run.steps=1000"))
    command.process.send_signal(signal.SIGINT)
    command.process.wait(WITHIN_S)
    assert command.exit_code == 130, command.output
    assert command.left_behind(1.0) == []
    newest = CheckpointStore(command.folder / "checkpoints").latest()
    with Ledger(command.folder / "ledger.sqlite", read_only=True) as ledger:
        assert newest is not None and newest.step == ledger.trained_through >= 3
    assert "FileNotFoundError" not in logs_of(command)
    assert command.summary["state"] == "stopped" and command.summary["steps"] == newest.step


@pytest.mark.slow
def test_a_run_that_was_stopped_leaves_nothing_but_its_last_step(start: Start) -> None:
    """The weights go only when nobody publishes any more.

    behaviour: B33
    """
    command = begun(start("run.steps=1000"))
    command.stop()
    assert command.left_behind(1.0) == []
    newest = CheckpointStore(command.folder / "checkpoints").latest()
    with Ledger(command.folder / "ledger.sqlite", read_only=True) as ledger:
        assert newest is not None and newest.step == ledger.trained_through >= 3
    assert "FileNotFoundError" not in logs_of(command)


@pytest.mark.slow
def test_a_run_that_fails_leaves_nothing(start: Start) -> None:
    """behaviour: B33"""
    command = start("run.steps=50", "run.faults=[corrupt_bucket]")
    command.wait_for(lambda status: bool(status["roles"]))
    command.note_ports()
    command.process.wait(180)
    assert command.exit_code == 1 and "could adopt weights" in command.output
    assert command.left_behind(1.0) == []


@pytest.mark.slow
def test_a_run_that_finishes_leaves_nothing(start: Start) -> None:
    """behaviour: B33"""
    command = begun(start("run.steps=20"))
    command.process.wait(180)
    assert command.exit_code == 0, command.output
    assert command.left_behind(1.0) == []
    assert not (command.folder / "logs" / "guardian.log").exists(), "nothing was left for the guardian"
    assert json.loads((command.folder / "summary.json").read_text())["state"] == "finished"


def logs_of(command: RunCommand) -> str:
    return "\n".join(path.read_text(errors="replace") for path in (command.folder / "logs").glob("replica_*"))

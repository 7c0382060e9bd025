"""Fault points: the process fails at the named passage, once in the life of the run folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from relax.config.faults import FaultAction, FaultPoint, Point
from relax.faults import EXIT_CODE, FaultInjected, FaultPoints, arm, disarm, fired

PASSES = """
import sys
from pathlib import Path
from relax.config.faults import FaultPoint, Point
from relax.faults import FaultPoints

fault = FaultPoint(point="mid_put", role="reward", action=sys.argv[2], at=3)
points = FaultPoints((fault,), ("reward",), Path(sys.argv[1]))
for n in range(1, 6):
    print(n, flush=True)
    points.passing(Point.MID_PUT)
"""


def passing_process(folder: Path, action: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PASSES, str(folder), action]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("exit", EXIT_CODE)])
def test_a_process_dies_at_its_nth_passage_and_its_successor_does_not(tmp_path: Path, action: str, code: int) -> None:
    for expected, passages in ((code, "1 2 3"), (0, "1 2 3 4 5")):
        process = passing_process(tmp_path, action)
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output.split()) == (expected, passages.split())


def test_a_process_that_hangs_goes_on_when_it_is_told_to(tmp_path: Path) -> None:
    process = passing_process(tmp_path, "hang")
    try:
        pid, status = os.waitpid(process.pid, os.WUNTRACED)
        assert pid == process.pid and os.WIFSTOPPED(status)
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
        assert output.split() == "1 2 3 4 5".split()
    finally:
        process.kill()
        process.wait(10)


def test_only_the_named_role_fails_and_only_once_over_replicas(tmp_path: Path) -> None:
    fault = FaultPoint(point=Point.AFTER_LEASE, role="instance", action=FaultAction.RAISE)
    other = FaultPoints((fault,), ("reward", "reward"), tmp_path)
    other.passing(Point.AFTER_LEASE)
    replicas = [FaultPoints((fault,), ("instance", f"rollout-{n}"), tmp_path) for n in range(2)]
    with pytest.raises(FaultInjected, match="after_lease of instance"):
        replicas[0].passing(Point.AFTER_LEASE)
    for replica in replicas:
        replica.passing(Point.AFTER_LEASE)


def test_a_full_disk_is_the_systems_own_error(tmp_path: Path) -> None:
    fault = FaultPoint(point=Point.MID_SAVE, role="dcs", action=FaultAction.NO_SPACE)
    with pytest.raises(OSError, match="No space left on device"):
        FaultPoints((fault,), ("dcs",), tmp_path).passing(Point.MID_SAVE)


def test_an_armed_fault_happens_at_the_next_passage_once_for_each_time_it_was_armed(tmp_path: Path) -> None:
    fault = FaultPoint(point=Point.BEFORE_COMMIT, role="actor", action=FaultAction.RAISE, at=None)
    points = FaultPoints((fault,), ("actor",), tmp_path)
    points.passing(Point.BEFORE_COMMIT)
    for _ in range(2):
        arm(fault, tmp_path, "actor")
        assert not fired(fault, tmp_path)
        with pytest.raises(FaultInjected):
            FaultPoints((fault,), ("actor",), tmp_path).passing(Point.BEFORE_COMMIT)
        assert fired(fault, tmp_path) and not disarm(fault, tmp_path)
        points.passing(Point.BEFORE_COMMIT)
    arm(fault, tmp_path, "actor")
    assert disarm(fault, tmp_path)
    points.passing(Point.BEFORE_COMMIT)


def test_an_armed_fault_is_of_the_process_that_was_named_and_of_no_other_of_its_role(tmp_path: Path) -> None:
    """behaviour: B34. Else the restart of the one that fired looks unasked, and the named one looks as if it hung."""
    fault = FaultPoint(point=Point.MID_PUT, role="instance", action=FaultAction.RAISE, at=None)
    first, second = (FaultPoints((fault,), ("instance", f"rollout-{n}"), tmp_path) for n in range(2))
    arm(fault, tmp_path, "rollout-0")
    second.passing(Point.MID_PUT)
    assert not fired(fault, tmp_path)
    with pytest.raises(FaultInjected):
        first.passing(Point.MID_PUT)
    assert fired(fault, tmp_path)


@pytest.mark.parametrize(
    ("point", "role", "words"),
    [
        ("mid_publish", "reward", "'reward' does not pass the point 'mid_publish'; who does: actor"),
        ("mid_adopt", "actor", "who does: instance"),
        ("epoch_border", "rollout-0", "who does: rollout"),
    ],
)
def test_a_role_that_never_passes_a_point_is_refused(point: Point, role: str, words: str) -> None:
    """behaviour: B40"""
    with pytest.raises(ValidationError, match=words):
        FaultPoint(point=point, role=role)


def test_one_replica_may_be_named() -> None:
    for role in ("instance", "rollout-1", "rollout-eval-0"):
        assert FaultPoint(point=Point.MID_ADOPT, role=role).role == role
    assert FaultPoint(point=Point.MID_PUT, role="teacher-good").role == "teacher-good"

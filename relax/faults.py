"""Fault points of a process: it fails where its run file says, once in the life of the run folder.

RUN/faults/<name>.armed      relax chaos: the next passage of the process that it names fails (faults with `at: null`)
RUN/faults/<name>.fired      written before the fault happens, so that a successor does not fail there again
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from relax.config.faults import FaultAction, FaultPoint, Point
from relax.types import RelaxError

FOLDER = "faults"
EXIT_CODE = 70
ARMED, FIRED = ".armed", ".fired"


class FaultInjected(RelaxError):
    """The fault `raise` of a fault point."""


class FaultPoints:
    """Of one process. `passing` costs one look at an empty mapping where no fault is configured."""

    def __init__(self, faults: Sequence[FaultPoint], names: tuple[str, ...], run_dir: Path) -> None:
        """`names`: by which faults mean this process: its role and its own name."""
        self._folder, self._names = run_dir / FOLDER, names
        self._passed: dict[Point, int] = {}
        self._mine: dict[Point, list[FaultPoint]] = {}
        for fault in faults:
            if fault.role in names and (fault.at is None or not self._file(fault, FIRED).exists()):
                self._mine.setdefault(fault.point, []).append(fault)

    def passing(self, point: Point) -> None:
        """Here the process fails if a fault says so. Raises what the fault raises."""
        if not self._mine:
            return
        self._passed[point] = self._passed.get(point, 0) + 1
        for fault in self._mine.get(point, ()):
            if self._claimed(fault, self._passed[point]):
                fire(fault)

    def _claimed(self, fault: FaultPoint, passed: int) -> bool:
        """Whether it is this passage, and nobody else has had it: on disk before anything happens."""
        if fault.at is None:
            return self._disarm(fault)
        return fault.at == passed and self._mark(fault)

    def _disarm(self, fault: FaultPoint) -> bool:
        armed = self._file(fault, ARMED)
        try:
            if armed.read_text() not in self._names:
                return False
            armed.rename(self._file(fault, FIRED))
        except FileNotFoundError:
            return False
        self._flush()
        return True

    def _mark(self, fault: FaultPoint) -> bool:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(self._file(fault, FIRED), "x") as file:
                os.fsync(file.fileno())
        except FileExistsError:  # another replica of the role, or an earlier life of this one
            return False
        self._flush()
        return True

    def _flush(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _file(self, fault: FaultPoint, suffix: str) -> Path:
        return self._folder / f"{fault.name}{suffix}"


def arm(fault: FaultPoint, run_dir: Path, victim: str) -> None:
    """The next passage of this process, by its name or its role, is to fail; for faults with `at: null`."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{fault.name}{FIRED}").unlink(missing_ok=True)
    partial = folder / f"{fault.name}.partial"
    partial.write_text(victim)
    partial.rename(folder / f"{fault.name}{ARMED}")


def disarm(fault: FaultPoint, run_dir: Path) -> bool:
    """Take an armed fault back. False when it has happened."""
    try:
        (run_dir / FOLDER / f"{fault.name}{ARMED}").unlink()
    except FileNotFoundError:
        return False
    return True


def fired(fault: FaultPoint, run_dir: Path) -> bool:
    """Whether it has happened since it was armed."""
    return (run_dir / FOLDER / f"{fault.name}{FIRED}").exists()


def fire(fault: FaultPoint) -> None:
    """Fail as the fault says. Returns only from `hang`, once somebody has sent SIGCONT."""
    where = f"fault at {fault.point} of {fault.role}"
    match fault.action:
        case FaultAction.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultAction.HANG:
            os.kill(os.getpid(), signal.SIGSTOP)
        case FaultAction.EXIT:
            os._exit(EXIT_CODE)
        case FaultAction.RAISE:
            raise FaultInjected(where)
        case FaultAction.NO_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where)

"""Takes down what a run has started when its driver is gone, however that ended.

    driver ──pipe──▶ guardian, in a session of its own
      what it starts and makes, a JSON line each; the end of the pipe means that the driver is gone

The driver itself cleans up on a normal end, an error and Ctrl-C; then nothing is left to do here. After its SIGKILL the
guardian ends the processes that were recorded, with all that they started, and removes the recorded folders. A process
is known by its number and the moment of its start, so that a number that was given to somebody else is never hit.

Reads `/proc`. Imports the standard library alone: it stays for as long as the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOOK_S = 5.0
"""How often it looks who belongs to the run: who is orphaned between two looks is found by its session."""
GRACE_S = 5.0
"""For Ray to stop its own, before they are killed."""
KILL_S = 15.0
"""For killed processes to be gone."""
_STATE, _PARENT, _SESSION, _START = 0, 1, 3, 19
"""Fields of /proc/<pid>/stat, counted behind the name."""


@dataclass(frozen=True, slots=True)
class Process:
    """`start`: clock ticks from the boot of the machine to its start, as the kernel has it."""

    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class Kin:
    """A running process, its parent and its session."""

    process: Process
    parent: int
    session: int


def running() -> dict[int, Kin]:
    """All processes of this machine by number, but for zombies."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (kin := _look_at(int(entry))) is not None:
            found[kin.process.pid] = kin
    return found


def process_of(pid: int) -> Process | None:
    """None when no such process runs."""
    kin = _look_at(pid)
    return None if kin is None else kin.process


def _look_at(pid: int) -> Kin | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    if fields[_STATE] in "ZX":
        return None
    return Kin(Process(pid, int(fields[_START])), int(fields[_PARENT]), int(fields[_SESSION]))


def family(roots: Iterable[Process], known: Iterable[Process], now: Mapping[int, Kin]) -> set[Process]:
    """Who of `now` belongs to the run: its roots and those known before, whoever they started, and whoever is in the
    session of a root that still runs."""
    alive = {process for process in (*roots, *known) if _runs(process, now)}
    sessions = {root.pid for root in roots if root in alive}
    alive |= {kin.process for kin in now.values() if kin.session in sessions}
    while True:
        pids = {process.pid for process in alive}
        children = {kin.process for kin in now.values() if kin.parent in pids} - alive
        if not children:
            return alive
        alive |= children


def _runs(process: Process, now: Mapping[int, Kin]) -> bool:
    kin = now.get(process.pid)
    return kin is not None and kin.process == process


@dataclass(slots=True)
class Charge:
    """What a driver has recorded."""

    roots: list[Process] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    """Removed, with what is in them."""
    shared_memory: list[tuple[Path, str, Path]] = field(default_factory=list)
    """(folder, beginning of the names, file with the run's id): the id completes the names."""
    kept: list[tuple[Path, Path]] = field(default_factory=list)
    """(folder, copy of it): copied before anything is removed."""
    log: Path | None = None

    def add(self, line: str) -> None:
        """Raises `ValueError` for a record that means nothing."""
        match json.loads(line):
            case {"process": [int(pid), int(start)]}:
                self.roots.append(Process(pid, start))
            case {"folder": str(folder)}:
                self.folders.append(Path(folder))
            case {"shared_memory": [str(folder), str(prefix), str(state)]}:
                self.shared_memory.append((Path(folder), prefix, Path(state)))
            case {"keep": [str(source), str(target)]}:
                self.kept.append((Path(source), Path(target)))
            case {"log": str(log)}:
                self.log = Path(log)
            case _:
                raise ValueError(f"a guardian cannot read: {line}")


def stop(roots: Iterable[Process], known: Iterable[Process], grace_s: float = GRACE_S) -> tuple[int, int]:
    """End the family: the roots are asked first. How many were there, and how many are left after `KILL_S`."""
    roots = list(roots)
    left = family(roots, known, running())
    count = len(left)
    for root in left & set(roots):
        _signal(root, signal.SIGINT)
    left = _await_end(roots, left, grace_s)
    end = time.monotonic() + KILL_S
    while left and time.monotonic() < end:
        for process in left:
            _signal(process, signal.SIGKILL)
        left = _await_end(roots, left, 0.5)
    return count, len(left)


def _await_end(roots: Iterable[Process], left: set[Process], wait_s: float) -> set[Process]:
    """Who is left, or was started meanwhile."""
    end = time.monotonic() + wait_s
    while True:
        left = family(roots, left, running())
        if not left or time.monotonic() > end:
            return left
        select.select([], [], [], 0.1)


def _signal(process: Process, number: signal.Signals) -> None:
    """Through a descriptor of the process, compared after it was opened: its number cannot change hands in between."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if process_of(process.pid) == process:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def keep(charge: Charge) -> None:
    """What has to outlive the folders that are removed: the logs say what the run did."""
    for source, target in charge.kept:
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore_dangling_symlinks=True)


def remove(charge: Charge) -> list[str]:
    """The recorded folders and the shared memory of the run; what was there."""
    found = [folder for folder in charge.folders if folder.exists()]
    for folder, prefix, state in charge.shared_memory:
        with contextlib.suppress(FileNotFoundError):  # no controller came up, so nothing was published
            run_id = json.loads(state.read_text())["run_id"]
            found += sorted(folder.glob(f"{prefix}{run_id}*"))
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return [str(path) for path in found]


def watch(pipe: int) -> Charge:
    """Take down what is recorded through `pipe`, once it ends; returns what that was."""
    charge, known, rest = Charge(), set[Process](), b""
    while True:
        ready, _, _ = select.select([pipe], [], [], LOOK_S)
        if ready:
            chunk = os.read(pipe, 65536)
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                charge.add(line.decode())
        known = family(charge.roots, known, running())
    stopped, left = stop(charge.roots, known)
    if stopped:
        keep(charge)
    removed = remove(charge)
    if stopped or removed:
        _tell(charge, f"the driver is gone: ended {stopped - left} of {stopped} processes, removed {removed}")
    return charge


def _tell(charge: Charge, words: str) -> None:
    if charge.log is None:
        return
    charge.log.parent.mkdir(parents=True, exist_ok=True)
    with charge.log.open("a", encoding="utf-8") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words}\n")


class Guard:
    """The driver's side. `record_*` before, or as soon as, the thing is there; `close` at the end."""

    def __init__(self) -> None:
        theirs, self._ours = os.pipe()  # neither is inherited by what the driver starts later
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", __file__, str(theirs)],  # without this project's packages and those it needs
                pass_fds=(theirs,),
                start_new_session=True,  # the signals of the driver's terminal do not reach it
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            os.close(theirs)

    def record_process(self, pid: int) -> None:
        """The leader of a session of its own: all of that session, and all that they started, goes with it."""
        process = process_of(pid)
        if process is not None:
            self._record({"process": [process.pid, process.start]})

    def record_folder(self, folder: Path) -> None:
        self._record({"folder": str(folder)})

    def record_shared_memory(self, folder: Path, prefix: str, state: Path) -> None:
        """`state`: JSON file with the `run_id` that follows `prefix` in the names."""
        self._record({"shared_memory": [str(folder), prefix, str(state)]})

    def record_keep(self, source: Path, target: Path) -> None:
        """Copy `source` to `target` before its folder is removed, when the driver could not."""
        self._record({"keep": [str(source), str(target)]})

    def record_log(self, path: Path) -> None:
        """Where it tells what it had to do."""
        self._record({"log": str(path)})

    def _record(self, record: dict[str, Any]) -> None:
        os.write(self._ours, json.dumps(record).encode() + b"\n")

    def close(self, deadline_s: float = 30.0) -> None:
        """It takes down what is left, and ends. Raises `subprocess.TimeoutExpired`."""
        os.close(self._ours)
        self.process.wait(deadline_s)


def main() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the driver, and by nothing else
    watch(int(sys.argv[1]))


if __name__ == "__main__":
    main()

"""The guardian of a run, over real processes: what it takes down, what it leaves alone, and when."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax.cli.guardian import Charge, Guard, Process, process_of, remove, running, stop

DEADLINE_S = 60.0
# A leader of a session, as Ray's head is: it starts a worker, one that is orphaned at once, and one that went into a
# session of its own, tells their numbers, and waits.
HEAD = """
    import os, subprocess, sys, time
    wait = [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.pause()"]
    worker = subprocess.Popen(wait)
    start = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"
    between = [sys.executable, "-c", start, *wait]
    orphan = int(subprocess.run(between, stdout=subprocess.PIPE, check=True).stdout)
    apart = subprocess.Popen(wait, start_new_session=True)
    print(worker.pid, orphan, apart.pid, flush=True)
    worker.wait()
"""
# A driver: starts a guardian and a head, records them, tells, and waits for its end.
DRIVER = """
    import subprocess, sys, time
    from pathlib import Path
    from relax.cli.guardian import Guard
    guard = Guard()
    folder, run = Path(sys.argv[1]), Path(sys.argv[2])
    guard.record_folder(folder / "ray")
    guard.record_keep(folder / "ray" / "logs", run / "logs")
    guard.record_shared_memory(folder / "shm", "relax-run-", run / "state.json")
    guard.record_log(run / "logs" / "guardian.log")
    head = subprocess.Popen(
        [sys.executable, "-c", sys.argv[3]], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    guard.record_process(head.pid)
    print(guard.process.pid, head.pid, head.stdout.readline(), flush=True)
    exec(sys.argv[4])
"""


def wait_for_ever() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)


class Driven:
    """A driver with all that it started."""

    def __init__(self, base: Path, then: str):
        self.ray, self.shm, self.run = base / "ray", base / "shm", base / "run"
        for folder in (self.ray / "logs", self.shm / "relax-run-abc", self.shm / "relax-run-abc-state", self.run):
            folder.mkdir(parents=True)
        (self.shm / "relax-run-other").mkdir()
        (self.shm / "relax-runner-abc").mkdir()
        (self.ray / "logs" / "actor.log").write_text("hello")
        (self.run / "state.json").write_text(json.dumps({"run_id": "abc"}))
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(DRIVER), str(base), str(self.run), textwrap.dedent(HEAD), then],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.others: list[psutil.Process] = []
        assert self.process.stdout is not None
        numbers = [int(number) for number in self.process.stdout.readline().split()]
        self.guardian = psutil.Process(numbers[0])
        self.others = [psutil.Process(number) for number in numbers[1:]]

    def await_end(self) -> None:
        """Of the guardian; then everything else has to be gone."""
        self.process.wait(DEADLINE_S)
        self.guardian.wait(DEADLINE_S)
        for process in self.others:
            assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, process

    def end(self) -> None:
        for process in (self.process, *self.others):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self.process.wait(DEADLINE_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            self.guardian.wait(DEADLINE_S)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = wait_for_ever()
    yield process
    process.kill()
    process.wait(DEADLINE_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGHUP, None])
def test_when_the_driver_is_gone_all_that_it_started_goes_and_nothing_else(
    tmp_path: Path, bystander: subprocess.Popen[bytes], number: signal.Signals | None
) -> None:
    """Killed, interrupted with all of its session, or ended by an error; workers may ignore SIGINT, be orphans, or have
    a session of their own.

    behaviour: B33
    """
    driven = Driven(tmp_path, "raise RuntimeError" if number is None else "import signal; signal.pause()")
    try:
        if number is not None:
            os.killpg(driven.process.pid, number)
        driven.await_end()
    finally:
        driven.end()
    assert not driven.ray.exists()
    assert sorted(path.name for path in driven.shm.iterdir()) == ["relax-run-other", "relax-runner-abc"]
    assert (driven.run / "logs" / "actor.log").read_text() == "hello"
    assert "ended 4 of 4 processes" in (driven.run / "logs" / "guardian.log").read_text()
    assert bystander.poll() is None


def test_a_guardian_outlives_the_signals_of_a_terminal(tmp_path: Path) -> None:
    """behaviour: B33"""
    driven = Driven(tmp_path, "import signal; signal.pause()")
    try:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            driven.guardian.send_signal(number)
        assert os.getsid(driven.guardian.pid) != os.getsid(driven.process.pid)
        driven.process.kill()
        driven.await_end()
    finally:
        driven.end()
    assert not driven.ray.exists()


def test_a_driver_that_cleaned_up_leaves_nothing_to_do(tmp_path: Path) -> None:
    guard = Guard()
    head = wait_for_ever()
    guard.record_process(head.pid)
    guard.record_log(tmp_path / "guardian.log")
    head.kill()
    head.wait(DEADLINE_S)
    guard.close(DEADLINE_S)
    assert guard.process.returncode == 0 and not (tmp_path / "guardian.log").exists()


def test_a_number_that_was_given_to_somebody_else_is_not_hit(bystander: subprocess.Popen[bytes]) -> None:
    """The same number, another start: its process, its session and its children are not of the run."""
    found = process_of(bystander.pid)
    assert found is not None
    earlier = Process(found.pid, found.start - 1)
    assert stop([earlier], [earlier], grace_s=0.0) == (0, 0)
    assert bystander.poll() is None
    assert stop([found], [], grace_s=0.0) == (1, 0)


def test_one_who_was_known_is_ended_though_its_root_and_parent_are_gone() -> None:
    """A root that died first has no session to go by: what was seen while it lived counts."""
    known = wait_for_ever()
    try:
        process = process_of(known.pid)
        assert process is not None and process in {kin.process for kin in running().values()}
        assert stop([Process(1 << 22, 1)], [process], grace_s=0.0) == (1, 0)
    finally:
        known.kill()
        known.wait(DEADLINE_S)


def test_without_a_run_id_no_shared_memory_is_touched(tmp_path: Path) -> None:
    (tmp_path / "relax-run-").mkdir()
    charge = Charge(shared_memory=[(tmp_path, "relax-run-", tmp_path / "state.json")])
    assert remove(charge) == [] and (tmp_path / "relax-run-").exists()


def test_a_record_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot read"):
        Charge().add('{"folders": ["/tmp"]}')

"""What the end-to-end tests share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from relax.cli.run import ControlClient, Outcome

ROOT = Path(__file__).parents[2]
TINY = ROOT / "deploy" / "tiny_cpu.yaml"
# A task that is learnt in a few dozen steps: repeat one digit.
EASY = ["rollout.data.task=copy", "rollout.data.params={length: 1}", "run.groups_per_step=8"]


@dataclass
class Folder:
    """What a run wrote."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return loaded

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@dataclass
class Finished(Folder):
    """A run that has ended, and its folder."""

    outcome: Outcome
    seen: list[dict[str, Any]] = field(default_factory=list)


Runner = Callable[..., Finished]


def kill_once(condition: Callable[[dict[str, Any]], bool], role: str) -> Callable[[dict[str, Any]], None]:
    """SIGKILL the process of a role, once, when the condition holds."""
    done: list[int] = []

    def during(status: dict[str, Any]) -> None:
        if done or not condition(status):
            return
        for view in status["roles"]:
            if view["instance"] == role:
                os.kill(view["pid"], signal.SIGKILL)
                done.append(view["pid"])

    return during


class RunCommand(Folder):
    """`relax run` (or `relax resume`) in a process of its own, with what it started and where it wrote."""

    def __init__(self, base: Path, overrides: list[str], *, resume: bool = False):
        super().__init__(base / "run")
        self.shm = base / "shm"
        self.shm.mkdir(exist_ok=True)
        what = ["resume", str(self.folder)] if resume else ["run", str(TINY)]
        settings = overrides if resume else [*overrides, f"run.run_dir={self.folder}", f"dcs.shm_dir={self.shm}"]
        arguments = [argument for setting in settings for argument in ("--set", setting)]
        self._log = base / ("resumed.txt" if resume else "output.txt")
        self._ports: set[int] = set()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "relax.cli.main", *what, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=base,
                # Ignored where the tests themselves run in the background, and children inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self._seen: set[psutil.Process] = set()
        self._ray_folder: str | None = None

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def running(self) -> bool:
        """Also notes what the command has started so far."""
        if self.process.poll() is not None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return True

    def status(self) -> dict[str, Any] | None:
        info = self._run_json()
        return ControlClient(info["url"]).status(5.0) if info else None

    def _run_json(self) -> dict[str, Any] | None:
        try:
            info: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None  # not there yet, or being written
        self._ray_folder = info["ray_folder"]
        return info

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], deadline_s: float = 400.0) -> None:
        self._wait(lambda: (status := self.status()) is not None and condition(status), deadline_s)

    def wait_for_output(self, text: str, deadline_s: float = 120.0) -> None:
        self._wait(lambda: text in self.output and self._run_json() is not None, deadline_s)

    def _wait(self, condition: Callable[[], bool], deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert self.running(), f"ended with {self.exit_code}:\n{self.output}"
            assert time.monotonic() < end, f"no such state within {deadline_s:g} s:\n{self.output}"
            time.sleep(0.2)

    def stop(self, deadline_s: float = 180.0) -> None:
        """As `relax stop`; then its own end is awaited."""
        info = self._run_json()
        assert info is not None
        ControlClient(info["url"]).stop(deadline_s)
        self.process.wait(deadline_s)

    def note_ports(self) -> None:
        """Where it listens now, with all that it started."""
        pids = {process.pid for process in self._seen}
        self._ports |= {
            connection.laddr.port
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.pid in pids and connection.laddr
        }
        assert self._ports

    def memory_bytes(self) -> int:
        """PSS of all that the command has started, Ray included, itself not."""
        total = 0
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total

    def left_behind(self, within_s: float = 10.0) -> list[str]:
        """Processes, noted ports, Ray's folder and shared memory of the ended command, after at most this time."""
        assert self._seen and self._ray_folder is not None
        alive = [f"process {p.pid}" for p in psutil.wait_procs(self._seen, timeout=within_s)[1]]
        listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr}
        ports = [f"port {port}" for port in sorted(self._ports & listening)]
        folders = [self._ray_folder] if Path(self._ray_folder).exists() else []
        return alive + ports + folders + [str(path) for path in self.shm.iterdir()]

    def end(self) -> None:
        """Whatever the test came to: nothing of it stays."""
        if self.running():
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        for process in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

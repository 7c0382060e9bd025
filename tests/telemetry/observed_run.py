"""A tiny run on a Ray of its own, with every tracker, held at its end until it was looked at."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from relax.cli.cluster import PrivateRay, free_ports
from relax.cli.run import ControlClient, document_for
from relax.config.file import load_run_file
from relax.telemetry.run_folder import RunFolder

TINY = Path(__file__).parents[2] / "deploy" / "tiny_cpu.yaml"
STEPS = 8
OVERRIDES = [
    f"run.steps={STEPS}",
    "run.groups_per_step=4",
    "actor.groups_per_lease=4",
    "run.group_size=4",
    "rollout.data.task=copy",
    "rollout.data.params={length: 1}",
    "controller.expect={}",
    "controller.trackers=[tensorboard, wandb]",
]


def wait_until(condition: Callable[[], Any], deadline_s: float, what: str) -> Any:
    """The first true answer."""
    end = time.monotonic() + deadline_s
    while not (answer := condition()):
        assert time.monotonic() < end, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.3)
    return answer


class ObservedRun:
    """`status`: of the finished run, whose controller still lives."""

    def __init__(self, folder: Path, control: ControlClient) -> None:
        self.folder, self.control = RunFolder(folder), control
        self.status: dict[str, Any] = {}

    @property
    def endpoint(self) -> str:
        (endpoint,) = self.folder.read_place()["metrics"]
        return str(endpoint)

    def wait_for_state(self, *states: str) -> None:
        def reached() -> bool:
            self.status = self.control.status() or {}
            assert self.status.get("state") != "failed", self.status.get("reason")
            return self.status.get("state") in states

        wait_until(reached, 200.0, f"run {' or '.join(states)}")


@contextmanager
def observed_run(folder: Path, log: Path) -> Iterator[ObservedRun]:
    ray = PrivateRay.start(log=log)
    try:
        file = load_run_file(TINY, [*OVERRIDES, f"run.run_dir={folder}"])
        (port,) = free_ports(1)
        control = ControlClient(f"http://127.0.0.1:{port}")
        RunFolder(folder).write_place(url=control.url)
        ray.dashboard.deploy(document_for(file, folder, port))
        run = ObservedRun(folder, control)
        run.wait_for_state("running", "finished")
        yield run
        control.stop()
    finally:
        ray.stop()


class Prometheus:
    """`relax observe` as a user starts it."""

    def __init__(self, run_dir: Path, log: Path, scrape_interval_s: int) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "relax.cli.main",
                    "observe",
                    str(run_dir),
                    "--scrape-interval-s",
                    str(scrape_interval_s),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "COLUMNS": "300"},
                # Ignored where the tests themselves run in the background, and children inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        found = wait_until(
            lambda: re.search(r"Prometheus: (http://127\.0\.0\.1:\d+)", self.output), 60.0, "its address"
        )
        self.url = str(found[1])
        wait_until(self._ready, 60.0, "Prometheus")

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.output
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False  # not listening yet

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30.0, trust_env=False).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def scrape_errors(self) -> list[str]:
        return [target["lastError"] for target in self.get("targets")["activeTargets"] if target["lastError"]]

    def interrupt(self) -> int:
        """Ctrl-C, and its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

"""One private Ray for the whole package; each test deploys its own run on it and takes it down again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_support import EASY, TINY, Finished, Runner
from rich.console import Console

from relax.cli.cluster import PrivateRay, free_ports
from relax.cli.run import ControlClient, deploy_and_watch, prepare_run_dir
from relax.config.file import load_run_file


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[PrivateRay]:
    ray = PrivateRay.start()
    yield ray
    tree = psutil.Process(ray.process.pid).children(recursive=True)
    ray.stop()
    assert [process.pid for process in tree if process.is_running()] == []
    assert not ray.folder.exists()


@pytest.fixture(scope="package")
def http_port() -> int:
    """Of Serve's proxy: it starts with the first run and stays."""
    return free_ports(1)[0]


@pytest.fixture
def run(ray_cluster: PrivateRay, http_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """run(*overrides, deploy=file, during=f, prepare=g): f(status) at each poll, g(run folder) before the start."""

    def start(
        *overrides: str,
        deploy: Path = TINY,
        during: Callable[[dict[str, Any]], None] | None = None,
        prepare: Callable[[Path], None] | None = None,
    ) -> Finished:
        folder = tmp_path / "run"
        easy = [*EASY, "controller.expect={}"] if deploy == TINY else []
        file = load_run_file(
            deploy, [*easy, f"run.run_dir={folder}", f"serve.http_options.port={http_port}", *overrides]
        )
        prepare_run_dir(folder, overwrite=True)
        if prepare is not None:
            prepare(folder)
        seen: list[dict[str, Any]] = []
        real_status = ControlClient.status

        def status(self: ControlClient, deadline_s: float = 10.0) -> dict[str, Any] | None:
            answer = real_status(self, deadline_s)
            if answer is not None:
                seen.append(answer)
                if during is not None:
                    during(answer)
            return answer

        monkeypatch.setattr(ControlClient, "status", status)
        outcome = deploy_and_watch(
            file,
            folder,
            dashboard_url=ray_cluster.dashboard.url,
            token=ray_cluster.dashboard.token,
            console=Console(quiet=True),
        )
        return Finished(folder, outcome, seen)

    return start


@pytest.fixture
def mount_small_disk() -> Iterator[Callable[[Path], None]]:
    """mount(folder): a file system of 256 KiB there."""
    mounted: list[Path] = []

    def mount(folder: Path) -> None:
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, timeout=10).returncode != 0:
            pytest.skip("mounting a tmpfs needs root")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)

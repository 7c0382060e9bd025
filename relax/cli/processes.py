"""The processes of one run, found below the raylets of its own Ray: never those of another run on the host."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

TITLES = {
    "controller": "ray::ServeReplica:controller:",
    "bus": "ray::EngineHost",
    "store": "ray::StorageHost",
    "proxy": "ray::ProxyActor",
    "serve": "ray::ServeController",
}
"""How Ray names the processes of what sends no heartbeats."""


def hosts(ray_folder: Path) -> dict[str, int]:
    """Pid of each of `TITLES` that is there. Of several storages the first."""
    found: dict[str, int] = {}
    for process in workers(ray_folder):
        title = _title(process)
        for name, prefix in TITLES.items():
            if title.startswith(prefix):
                found.setdefault(name, process.pid)
    return found


def workers(ray_folder: Path) -> list[psutil.Process]:
    """Children of the raylets whose session lies in this folder."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet" and any(str(ray_folder) in word for word in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += process.children()
    return found


def belongs(pid: int, ray_folder: Path) -> bool:
    """Whether this process is one of the run's: pids are given out again."""
    return any(process.pid == pid for process in workers(ray_folder))


def children(pid: int) -> list[int]:
    """Of a process of the run; none when it is gone."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.NoSuchProcess:
        return ""

"""Two Ray nodes in network namespaces of their own, joined by a cable: neither sees the other's loopback, /dev/shm or
Ray folder. Files elsewhere are shared, as on a cluster with a common file system."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from relax.cli.cluster import Dashboard, PrivateRay

HEAD_IP, AWAY_IP = "10.213.0.1", "10.213.0.2"
DASHBOARD = f"http://{HEAD_IP}:8265"
# Polls until the API is gone, from within the head's namespace.
POLLER = """
import sys, time, urllib.request
seen = False
while True:
    try:
        with urllib.request.urlopen("http://127.0.0.1:8000/api/v1/status", timeout=5) as answer:
            print(answer.read().decode(), flush=True)
            seen = True
    except OSError:
        if seen:
            break
    time.sleep(0.5)
"""


def why_not() -> str | None:
    """Why namespaces cannot be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    name = f"rx{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=30)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    mount = ["ip", "netns", "exec", name, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    mounted = subprocess.run(mount, capture_output=True, text=True, timeout=30)
    subprocess.run(["ip", "netns", "del", name], check=True, timeout=30)
    return f"a namespace cannot have its own /dev/shm: {mounted.stderr.strip()}" if mounted.returncode else None


@dataclass
class Node:
    name: str
    ip: str
    ray: PrivateRay | None = None

    def inside(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def pids(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=30)
        return [int(pid) for pid in listed.stdout.split()]


@dataclass
class TwoNodes:
    """`start` and `stop`; Ray offers the resource `head` on one node and `away` on the other."""

    head: Node = field(default_factory=lambda: Node(f"rx{os.getpid()}h", HEAD_IP))
    away: Node = field(default_factory=lambda: Node(f"rx{os.getpid()}a", AWAY_IP))
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="rx2-", dir="/tmp")))
    token: str = field(default_factory=lambda: secrets.token_hex(32))

    def start(self) -> None:
        for node in (self.head, self.away):
            _ip("netns", "add", node.name)
        a, b = f"rx{os.getpid()}x", f"rx{os.getpid()}y"
        _ip("link", "add", a, "netns", self.head.name, "type", "veth", "peer", "name", b, "netns", self.away.name)
        for node, device in ((self.head, a), (self.away, b)):
            _ip("-n", node.name, "addr", "add", f"{node.ip}/24", "dev", device)
            for name in (device, "lo"):
                _ip("-n", node.name, "link", "set", name, "up")
        (self.folder / "token").write_text(self.token)
        (self.folder / "ray").mkdir()
        self._ray(self.head, "--head", "--port", "6379", "--dashboard-host", HEAD_IP, "--temp-dir", self._ray_folder)
        self._ray(self.away, "--address", f"{HEAD_IP}:6379")

    @property
    def _ray_folder(self) -> str:
        return str(self.folder / "ray")

    def environment(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_num_workers_soft_limit": "0",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        }

    def _ray(self, node: Node, *arguments: str, deadline_s: float = 120.0) -> None:
        own = self.folder / node.name
        own.mkdir()
        kind = "head" if node is self.head else "away"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += ["--node-ip-address", node.ip, "--num-cpus", "4", "--object-store-memory", "100000000"]
        command += ["--resources", json.dumps({kind: 1000}), *arguments]
        script = (
            "mount -t tmpfs -o size=512m tmpfs /dev/shm && mount --bind $0 $1 && shift && "
            'exec "$@"'  # its own mounts, and nobody else's: `ip netns exec` made them private
        )
        log = own / "start.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                node.inside("sh", "-c", script, str(own), self._ray_folder, *command),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
            )
        node.ray = PrivateRay(process, own, f"{HEAD_IP}:6379", Dashboard(DASHBOARD, self.token))
        end = time.monotonic() + deadline_s
        while "Ray runtime started" not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)

    def run(self, folder: Path, file: Path, *overrides: str, deadline_s: float) -> Away:
        """`relax run` on the head, from its namespace."""
        settings = [argument for setting in overrides for argument in ("--set", setting)]
        command = self.head.inside(sys.executable, "-m", "relax.cli.main", "run", str(file), "--address", DASHBOARD)
        statuses = folder.parent / "statuses.jsonl"
        with statuses.open("wb") as seen:
            poller = subprocess.Popen(
                self.head.inside(sys.executable, "-c", POLLER), stdout=seen, stderr=subprocess.DEVNULL
            )
        try:
            done = subprocess.run(
                [*command, *settings],
                env=self.environment(),
                cwd=folder.parent,
                capture_output=True,
                text=True,
                timeout=deadline_s,
            )
        finally:
            poller.kill()
            poller.wait(30)
        lines = [json.loads(line) for line in statuses.read_text().splitlines() if line.endswith("}")]
        return Away(done.returncode, done.stdout + done.stderr, lines)

    def shm(self, node: Node) -> list[str]:
        """Names in a node's own /dev/shm, Ray's left out."""
        assert node.ray is not None
        names = os.listdir(f"/proc/{node.ray.process.pid}/root/dev/shm")
        return sorted(name for name in names if "relax" in name)

    def stop(self) -> None:
        for node in (self.away, self.head):
            if node.ray is not None:
                node.ray.stop()
            left = [psutil.Process(pid) for pid in node.pids() if psutil.pid_exists(pid)]
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=15.0)
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True, timeout=30)
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Away:
    exit_code: int
    output: str
    statuses: list[dict[str, Any]]

    def counters(self, instance: str) -> dict[str, float]:
        """The last that a role reported."""
        found: dict[str, float] = {}
        for status in self.statuses:
            for view in status["roles"]:
                if view["instance"] == instance:
                    found = view["counters"]
        return found


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)

"""A private local Ray: own ports, own temp folder, own token, and nothing left behind."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from relax.cli.guardian import Guard
from relax.types import RelaxError


class ClusterError(RelaxError):
    """Ray could not be started, reached or told; carries its own words."""


def free_ports(count: int) -> list[int]:
    """Distinct ports that are free on loopback now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def port_is_free(host: str, port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
        return True


WORKER_PORTS = 400
FIRST_WORKER_PORT, LAST_WORKER_PORT = 10_000, 32_000
"""Below the range that the kernel hands out, so that no port picked by `free_ports` lies in it."""


def worker_port_block() -> int:
    """First port of a block in which nothing listens; where the search begins differs by process."""
    listening = (c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    taken = {address.port for address in listening if address}
    blocks = (LAST_WORKER_PORT - FIRST_WORKER_PORT) // WORKER_PORTS
    for offset in range(blocks):
        low = FIRST_WORKER_PORT + (os.getpid() + offset) % blocks * WORKER_PORTS
        if taken.isdisjoint(range(low, low + WORKER_PORTS)):
            return low
    raise ClusterError(f"no {WORKER_PORTS} adjoining free ports in {FIRST_WORKER_PORT}-{LAST_WORKER_PORT}")


@dataclass(slots=True)
class Dashboard:
    """The REST side of a Ray cluster."""

    url: str
    token: str | None = None

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def request(self, method: str, path: str, body: Any = None, deadline_s: float = 60.0) -> Any:
        try:
            response = httpx.request(
                method, self.url + path, json=body, headers=self._headers(), timeout=deadline_s, trust_env=False
            )
        except httpx.HTTPError as error:
            raise ClusterError(f"{method} {self.url}{path}: {error}") from error
        if response.status_code >= 400:
            raise ClusterError(f"{method} {path}: HTTP {response.status_code}: {response.text[:2000]}")
        return response.json() if response.content else None

    def deploy(self, document: dict[str, Any]) -> None:
        self.request("PUT", "/api/serve/applications/", document, deadline_s=120.0)

    def applications(self) -> dict[str, Any]:
        apps: dict[str, Any] = self.request("GET", "/api/serve/applications/")["applications"]
        return apps

    def delete(self) -> None:
        self.request("DELETE", "/api/serve/applications/", deadline_s=120.0)


@dataclass(slots=True)
class PrivateRay:
    """Started with `start`, ended with `stop`; the temp folder goes with it."""

    process: subprocess.Popen[bytes]
    folder: Path
    address: str
    dashboard: Dashboard
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(
        cls, *, num_cpus: int = 8, deadline_s: float = 120.0, log: Path | None = None, guard: Guard | None = None
    ) -> PrivateRay:
        # Ray puts Unix sockets below its temp folder: their paths must stay under 107 characters.
        folder = Path(tempfile.mkdtemp(prefix="rlx-", dir="/tmp"))
        if guard is not None:
            guard.record_folder(folder)
        gcs, dashboard, client, metrics, agent, auto, dash_metrics, nm, om, rt = free_ports(10)
        low = worker_port_block()
        token = secrets.token_hex(32)
        token_file = folder / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(token)
        environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_file),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Nobody reads the task table and the event statistics of a private Ray, and each call pays for them.
            "RAY_task_events_report_interval_ms": "0",
            "RAY_event_stats": "0",
            # Deploying leaves idle workers of 40 MB each; by default as many stay as there are CPUs.
            "RAY_num_workers_soft_limit": "0",
            "AUTOSCALER_METRIC_PORT": str(auto),
            "DASHBOARD_METRIC_PORT": str(dash_metrics),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            # Processes that Ray kills leave their temporary files: they go with the folder.
            "TMPDIR": str(folder),
            "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
            "RELAX_HOME": os.environ.get("RELAX_HOME", os.getcwd()),
        }
        environment.pop("RAY_ADDRESS", None)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        command += ["--port", str(gcs), "--temp-dir", str(folder / "ray"), "--num-cpus", str(num_cpus)]
        command += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard)]
        command += ["--ray-client-server-port", str(client), "--metrics-export-port", str(metrics)]
        command += ["--dashboard-agent-listen-port", str(agent), "--node-manager-port", str(nm)]
        command += ["--object-manager-port", str(om), "--runtime-env-agent-port", str(rt)]
        command += ["--min-worker-port", str(low), "--max-worker-port", str(low + WORKER_PORTS - 1)]
        command += ["--object-store-memory", str(200_000_000), "--node-ip-address", "127.0.0.1"]
        # One node without a driver: nothing to scale, and nobody to push the workers' logs to.
        command += ["--no-monitor", "--include-log-monitor", "false"]
        log_path = log or folder / "ray-start.log"
        with log_path.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        if guard is not None:
            guard.record_process(process.pid)
        ray = cls(process, folder, f"127.0.0.1:{gcs}", Dashboard(f"http://127.0.0.1:{dashboard}", token), environment)
        try:
            ray._wait_ready(log_path, deadline_s)
        except BaseException:
            ray.stop()
            raise
        return ray

    def _wait_ready(self, log_path: Path, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise ClusterError(f"ray start ended with {self.process.returncode}:\n{log_path.read_text()[-3000:]}")
            if "Ray runtime started" in log_path.read_text(errors="replace"):
                try:
                    self.dashboard.request("GET", "/api/version", deadline_s=2.0)
                    self.dashboard.applications()
                    return
                except ClusterError:
                    pass  # the dashboard's Serve module comes up after Ray itself
            time.sleep(0.1)
        raise ClusterError(f"Ray was not up within {deadline_s:g} s:\n{log_path.read_text()[-3000:]}")

    def stop(self, grace_s: float = 15.0) -> None:
        """SIGINT lets Ray stop its own; what is left of its process tree is killed."""
        try:
            tree = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            tree = []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(grace_s)
        for child in psutil.wait_procs(tree, timeout=3.0)[1]:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(tree, timeout=grace_s)
        shutil.rmtree(self.folder, ignore_errors=True)

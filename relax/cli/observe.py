"""`relax observe`: Prometheus on one run, and files that point Grafana at it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from relax.cli.cluster import free_ports, port_is_free
from relax.telemetry.observability import observability_files, write_files
from relax.telemetry.run_folder import RunFolder
from relax.types import RelaxError

HOST = "127.0.0.1"
INSTALL = (
    "prometheus is not on the PATH: install the package `prometheus` (Debian and Ubuntu: apt-get install prometheus), "
    "or unpack a release from https://prometheus.io/download and add its folder to the PATH"
)


class ObserveError(RelaxError):
    """Prometheus cannot be started on this run; says what to do."""


@dataclass(frozen=True, slots=True)
class Observation:
    """`command` runs Prometheus; `folder` holds its configuration, its data and Grafana's files."""

    url: str
    folder: Path
    command: list[str]

    @property
    def provisioning(self) -> Path:
        return self.folder / "grafana" / "provisioning"


def prepare(run_dir: Path, port: int, scrape_interval_s: float) -> Observation:
    """Write the configuration into the run folder. Raises `ObserveError`."""
    binary = shutil.which("prometheus")
    if binary is None:
        raise ObserveError(INSTALL)
    if not (run_dir / "run.json").exists():
        raise ObserveError(f"{run_dir} is no run folder: start the run first, it writes run.json there")
    if port and not port_is_free(HOST, port):
        raise ObserveError(f"port {port} on {HOST} is in use: choose another, or --port 0 for a free one")
    folder = run_dir.resolve() / "prometheus"
    url = f"http://{HOST}:{port or free_ports(1)[0]}"
    files = observability_files(
        f"../{RunFolder(run_dir).targets_path.name}",
        datasource_url=url,
        dashboards_folder=str(folder / "grafana" / "dashboards"),
        scrape_interval_s=scrape_interval_s,
    )
    write_files(folder, files)
    command = [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    return Observation(
        url, folder, [*command, f"--web.listen-address={url.removeprefix('http://')}", "--log.level=warn"]
    )


def become_prometheus(observation: Observation) -> None:
    """Replace this process: Ctrl-C and signals reach Prometheus itself, and nothing can be left behind."""
    os.execv(observation.command[0], observation.command)

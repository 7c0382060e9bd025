"""`relax observe` on a run folder whose only node is a small exporter."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from observed_run import Prometheus, wait_until
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from typer.testing import CliRunner

from relax.cli.main import app
from relax.cli.observe import Observation
from relax.telemetry.run_folder import RunFolder


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    registry = CollectorRegistry()
    Gauge("ray_relax_held_version", "x", ["run", "instance", "otel_scope_name"], registry=registry).labels(
        "tiny", "rollout-0", "ray"
    ).set(3)
    Gauge("ray_gcs_whatever", "x", registry=registry).set(1)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    folder = RunFolder(tmp_path / "run")
    folder.write_place(url="http://127.0.0.1:1")
    folder.write_targets([f"127.0.0.1:{server.server_port}"], "tiny")
    yield folder.path
    server.shutdown()
    server.server_close()
    thread.join(10.0)


@pytest.fixture
def observe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """observe(*arguments) -> what the refused command says."""

    def started(observation: Observation) -> None:
        raise AssertionError(f"was not refused: {observation}")

    monkeypatch.setattr("relax.cli.observe.become_prometheus", started)
    return refused


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["observe", *arguments])
    assert result.exit_code == 1, result.output
    return result.output


def test_without_prometheus_the_package_to_install_is_named(
    run_dir: Path, observe: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert "install the package `prometheus`" in observe(str(run_dir))


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (package prometheus) is not installed")
def test_what_cannot_be_observed_is_told(run_dir: Path, tmp_path: Path, observe: Callable[..., str]) -> None:
    assert "is no run folder" in observe(str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in observe(str(run_dir), "--port", str(port))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (package prometheus) is not installed")
def test_prometheus_scrapes_the_run_s_nodes_keeps_our_labels_and_ends_with_ctrl_c(
    run_dir: Path, tmp_path: Path
) -> None:
    """behaviour: B42"""
    prometheus = Prometheus(run_dir, tmp_path / "log", scrape_interval_s=1)
    try:
        (series,) = wait_until(lambda: prometheus.query("ray_relax_held_version"), 60.0, "the series")
        assert series["value"][1] == "3"
        labels = series["metric"]
        assert (labels["run"], labels["instance"], labels["job"]) == ("tiny", "rollout-0", "relax")
        assert "exported_instance" not in labels and "otel_scope_name" not in labels
        assert prometheus.query("ray_gcs_whatever") == []
        assert [sample["value"][1] for sample in prometheus.query('up{run="tiny"}')] == ["1"]
        (provisioning,) = re.findall(r"GF_PATHS_PROVISIONING=(\S+) grafana server", prometheus.output)
        assert prometheus.url in (Path(provisioning) / "datasources" / "relax.yml").read_text()
        dashboards = (Path(provisioning) / "dashboards" / "relax.yml").read_text()
        assert str(run_dir / "prometheus" / "grafana" / "dashboards") in dashboards
        assert prometheus.interrupt() == 0, prometheus.output
        with pytest.raises(httpx.ConnectError):
            httpx.get(prometheus.url, timeout=5.0, trust_env=False)
    finally:
        prometheus.end()

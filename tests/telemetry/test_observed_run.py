"""A real run, looked at from every side: its status, its files, its metrics endpoint, Prometheus, both dashboards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from observed_run import STEPS, ObservedRun, Prometheus, observed_run, wait_until
from prometheus_text import scrape_until
from tracker_files import tensorboard_steps, wandb_steps

from relax.telemetry.live import LIVE, RUN_STATES
from relax.telemetry.metrics import METRICS, validate
from relax.telemetry.rules import ALERTS, RECORDINGS

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NOT_IN_A_RUN_THAT_IS_WELL = {"dropped_samples"}
"""Has a series for each reason that a sample was dropped for."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedRun]:
    base = tmp_path_factory.mktemp("observed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", "1000")
        with observed_run(base / "run", base / "ray.log") as observed:
            yield observed


@pytest.fixture(scope="module")
def prometheus(run: ObservedRun) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (package prometheus)")
    server = Prometheus(run.folder.path, run.folder.path.parent / "prometheus.log", scrape_interval_s=4)
    yield server
    server.end()


@pytest.fixture(scope="module")
def finished(run: ObservedRun, request: pytest.FixtureRequest) -> ObservedRun:
    """Prometheus, where it is there, has followed the run from before its end."""
    if shutil.which("prometheus") is not None:
        request.getfixturevalue("prometheus")
    run.wait_for_state("finished")
    return run


def as_prometheus(record: dict[str, float]) -> dict[str, float]:
    return {f"ray_{METRICS[name].prometheus}": value for name, value in record.items()}


def test_console_file_endpoint_tensorboard_and_wandb_hold_equal_values(finished: ObservedRun) -> None:
    """behaviour: B42"""
    records = finished.folder.read_metrics()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert finished.status["metrics"] == records[-1]
    wanted = as_prometheus(records[-1])
    series = scrape_until(finished.endpoint, lambda found: found.get("ray_relax_step", [({}, 0.0)])[0][1] == STEPS)
    assert {name: series[name][0][1] for name in wanted} == wanted
    assert all(labels["run"] == "tiny" for name in wanted for labels, _ in series[name])
    by_step = {int(record["step"]): record for record in records}
    assert wandb_steps(finished.folder.path / "wandb") == by_step
    rounded = {
        step: {name: float(np.float32(value)) for name, value in record.items()} for step, record in by_step.items()
    }
    assert tensorboard_steps(finished.folder.path / "tensorboard") == rounded
    assert finished.status["tracker_errors"] == {} == finished.status["summary"]["tracker_errors"]
    for record in records:
        validate(record)


def test_the_live_state_of_every_role_is_exported_and_no_share_is_over_one(finished: ObservedRun) -> None:
    """behaviour: B42"""
    ended = RUN_STATES["finished"]
    series = scrape_until(finished.endpoint, lambda found: found["ray_relax_run_state"][0][1] == ended)
    missing = {name for name, metric in LIVE.items() if f"ray_{metric.prometheus}" not in series}
    assert missing <= NOT_IN_A_RUN_THAT_IS_WELL
    roles = {(view["role"], view["instance"]) for view in finished.status["roles"]}
    assert {(labels["role"], labels["instance"]) for labels, _ in series["ray_relax_role_state"]} == roles
    assert len(roles) == 7
    shares: dict[str, float] = {}
    for labels, value in series["ray_relax_time_share"]:
        shares[labels["instance"]] = shares.get(labels["instance"], 0.0) + value
    assert shares.keys() == {instance for _, instance in roles}
    assert all(share == pytest.approx(1.0, abs=1e-6) for share in shares.values()), shares
    assert [value for labels, value in series["ray_relax_incidents_total"] if labels["kind"] == "metric_refused"] == [
        0.0
    ]
    versions = {labels["instance"]: value for labels, value in series["ray_relax_held_version"]}
    assert versions["actor"] == STEPS and versions["rollout-0"] >= STEPS - 1  # the last version serves nobody


def dashboard_queries(folder: Path) -> list[tuple[str, str]]:
    """(panel, expression) with the variables filled in as Grafana would."""
    values = {"$run": "tiny", "$role": "(actor|instance|ref|reward|rollout|dcs)", "$__rate_interval": "30s"}
    found = []
    for path in sorted(folder.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"]
                for name, value in values.items():
                    expression = expression.replace(name, value)
                assert "$" not in expression, expression
                found.append((f"{path.name}: {panel['title']}", expression))
    return found


def test_every_panel_and_every_rule_returns_data(finished: ObservedRun, prometheus: Prometheus) -> None:
    """behaviour: B42"""
    queries = dashboard_queries(finished.folder.path / "prometheus" / "grafana" / "dashboards")
    assert len(queries) > 50
    queries += [(item.record, item.record) for item in RECORDINGS]
    queries += [(alert.name, alert.value) for alert in ALERTS]  # an alert of a run that is well does not fire

    def empty() -> list[Any]:
        return [query for query in queries if not prometheus.query(query[1])]

    left: list[Any] = []
    try:
        wait_until(lambda: not left.clear() and not left.extend(empty()) and not left, 60.0, "data for every query")
    except AssertionError as error:
        raise AssertionError(f"no data: {left}; scraping: {prometheus.scrape_errors()}") from error
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(RECORDINGS) + len(ALERTS)
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule["type"] == "alerting" and rule["state"] == "firing"] == []


def test_prometheus_holds_the_values_of_the_file_and_our_own_labels(
    finished: ObservedRun, prometheus: Prometheus
) -> None:
    """behaviour: B42"""
    wanted = as_prometheus(finished.folder.read_metrics()[-1])
    wait_until(lambda: prometheus.query(f"ray_relax_step == {STEPS}"), 60.0, "the last step")
    held = {name: float(prometheus.query(name)[0]["value"][1]) for name in wanted}
    assert held == wanted
    (series,) = prometheus.query('ray_relax_generated_tokens_total{instance="rollout-0"}')
    assert series["metric"]["role"] == "instance" and not any("otel" in label for label in series["metric"])

"""What lies in deploy/observability: made from the tables, and understood by Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from relax.telemetry.dashboards import dashboards
from relax.telemetry.live import LIVE
from relax.telemetry.metrics import METRICS
from relax.telemetry.observability import deployed_files, write_files
from relax.telemetry.rules import ALERTS, RECORDINGS, series

DEPLOYED = Path(__file__).parents[2] / "deploy" / "observability"
KNOWN = {f"ray_{metric.prometheus}" for metric in (*METRICS.values(), *LIVE.values())}


def expressions() -> list[str]:
    panels = [target["expr"] for body in dashboards().values() for p in body["panels"] for target in p["targets"]]
    return [*panels, *(item.expression for item in RECORDINGS), *(alert.expression for alert in ALERTS)]


def test_the_files_are_those_that_the_tables_make() -> None:
    """behaviour: B42"""
    made = deployed_files()
    assert {name: (DEPLOYED / name).read_text() for name in made} == made
    lying = {path.relative_to(DEPLOYED).as_posix() for path in DEPLOYED.rglob("*") if path.suffix in (".yml", ".json")}
    assert {name for name in lying if not name.startswith("targets/")} == set(made)


def test_every_query_is_about_metrics_of_the_tables_and_recorded_series() -> None:
    """behaviour: B42"""
    for expression in expressions():
        assert set(re.findall(r"ray_\w+", expression)) <= KNOWN, expression
        assert set(re.findall(r"relax:\w+", expression)) <= {item.record for item in RECORDINGS}, expression
    with pytest.raises(KeyError):
        series("no_such_metric")


def test_the_panels_of_a_dashboard_neither_overlap_nor_leave_the_grid() -> None:
    for body in dashboards().values():
        taken: set[tuple[int, int]] = set()
        for panel in body["panels"]:
            place = panel["gridPos"]
            cells = {(x, place["y"]) for x in range(place["x"], place["x"] + place["w"])}
            assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
            taken |= cells
        assert json.loads(json.dumps(body)) == body
        assert len({panel["id"] for panel in body["panels"]}) == len(body["panels"])


def test_every_alert_has_a_summary_and_a_severity() -> None:
    for rule in yaml.safe_load(deployed_files()["rules.yml"])["groups"][1]["rules"]:
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"], rule


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is not installed")
def test_prometheus_accepts_configuration_and_rules(tmp_path: Path) -> None:
    write_files(tmp_path, deployed_files())
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "run.json").write_text('[{"targets": ["127.0.0.1:1"], "labels": {"run": "tiny"}}]')
    checked = subprocess.run(
        ["promtool", "check", "config", "--lint-fatal", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0 and "WARNING" not in checked.stdout + checked.stderr, checked
    assert f"{len(RECORDINGS) + len(ALERTS)} rules found" in checked.stdout

"""Files for Prometheus and Grafana: `python -m relax.telemetry.observability deploy/observability` writes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from relax.telemetry.dashboards import dashboards
from relax.telemetry.rules import rules

HEAD = "# Written by `python -m relax.telemetry.observability`: change relax/telemetry/{source} instead.\n"
JOB = "relax"
SCRAPE_INTERVAL_S = 10.0
"""As often as Ray exports; its endpoint may need more than a second of a busy machine."""
KEPT_SERIES = "ray_(relax|serve|node)_.*"
"""Of the thousands of series of a Ray node: ours, the state of Serve, and what the machine does."""
DROPPED_LABELS = "otel_scope_.*|Version|SessionName|Component"


def observability_files(
    targets: str, *, datasource_url: str, dashboards_folder: str, scrape_interval_s: float = SCRAPE_INTERVAL_S
) -> dict[str, str]:
    """Path below the folder -> content.

    `targets`: the file or pattern that Prometheus finds its targets in, relative to the folder.
    `datasource_url`, `dashboards_folder`: as Grafana reaches Prometheus and the dashboards.
    """
    provisioning = "grafana/provisioning"
    return {
        "prometheus.yml": _yaml("observability.py", _prometheus(targets, scrape_interval_s)),
        "rules.yml": _yaml("rules.py", rules()),
        f"{provisioning}/datasources/relax.yml": _yaml("observability.py", _datasources(datasource_url)),
        f"{provisioning}/dashboards/relax.yml": _yaml("observability.py", _providers(dashboards_folder)),
        **{f"grafana/dashboards/{name}": json.dumps(body, indent=1) + "\n" for name, body in dashboards().items()},
    }


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def deployed_files() -> dict[str, str]:
    """What deploy/observability holds: for Prometheus and Grafana of one's own, and any number of runs."""
    return observability_files(
        "targets/*.json", datasource_url="${PROMETHEUS_URL}", dashboards_folder="${RELAX_DASHBOARDS}"
    )


def _prometheus(targets: str, scrape_interval_s: float) -> dict[str, Any]:
    interval = f"{round(scrape_interval_s * 1000)}ms"
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {
                "job_name": JOB,
                # Our series carry `instance` and `run` of their own: those of the target must not replace them.
                "honor_labels": True,
                "file_sd_configs": [{"files": [targets], "refresh_interval": "10s"}],
                "metric_relabel_configs": [
                    {"action": "keep", "source_labels": ["__name__"], "regex": KEPT_SERIES},
                    {"action": "labeldrop", "regex": DROPPED_LABELS},
                ],
            }
        ],
    }


def _datasources(url: str) -> dict[str, Any]:
    source = {"name": "Relax", "uid": "relax", "type": "prometheus", "access": "proxy", "url": url, "isDefault": True}
    return {"apiVersion": 1, "datasources": [{**source, "jsonData": {"timeInterval": f"{SCRAPE_INTERVAL_S:g}s"}}]}


def _providers(folder: str) -> dict[str, Any]:
    provider = {"name": "relax", "folder": "Relax", "type": "file", "options": {"path": folder}}
    return {"apiVersion": 1, "providers": [provider]}


def _yaml(source: str, content: Mapping[str, Any]) -> str:
    return HEAD.format(source=source) + yaml.safe_dump(content, sort_keys=False, width=120)


if __name__ == "__main__":
    write_files(Path(sys.argv[1]), deployed_files())

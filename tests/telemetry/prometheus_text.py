"""Reads what Ray's metrics endpoint shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

Series = dict[str, list[tuple[dict[str, str], float]]]


def scrape(endpoint: str) -> Series:
    """Name -> (labels, value) of each series that is ours."""
    answer = httpx.get(f"http://{endpoint}/metrics", timeout=30.0, trust_env=False)
    answer.raise_for_status()
    series: Series = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name.startswith("ray_relax_"):
                series.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
    return series


def scrape_until(endpoint: str, condition: Callable[[Series], Any], deadline_s: float = 60.0) -> Series:
    end = time.monotonic() + deadline_s
    while not condition(series := scrape(endpoint)):
        assert time.monotonic() < end, f"no such series within {deadline_s:g} s: {sorted(series)}"
        time.sleep(0.5)
    return series

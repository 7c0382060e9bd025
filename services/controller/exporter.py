"""The sink that Prometheus reads: gauges on Ray's metrics endpoint, one endpoint per node for all processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import ray
from ray.exceptions import RayError
from ray.util.metrics import Gauge

from bus.records import BusStats
from relax.control.runstate import RunState
from relax.telemetry.live import LIVE, LiveSample, check_live
from relax.telemetry.metrics import Metric, MetricError, metric_named
from relax.telemetry.run_folder import RunFolder, RunFolderError
from services.controller.book import RunBook
from services.controller.incidents import Incidents
from services.controller.live import LiveState, live_samples

logger = logging.getLogger("ray.serve")

RUN = "run"
ENDPOINTS_EVERY_S = 15.0
"""Nodes that join or leave are in the list that Prometheus reads after at most this time."""
ENDPOINTS_DEADLINE_S = 10.0


class RayMetrics:
    """Ray puts `ray_` before each name and exports every few seconds (RAY_metrics_report_interval_ms).

    Totals are gauges too: Ray's counters can neither show 0 nor be set to a total, and a series that only
    begins with the first incident breaks alerts and panels. A gauge that is not set for two intervals vanishes,
    so a step's values are set again with each live state.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Gauge] = {}
        self._record: Mapping[str, float] = {}

    def write(self, record: Mapping[str, float]) -> None:
        self._record = record
        for name, value in record.items():
            metric = metric_named(name)
            if metric is None:
                raise MetricError(f"unknown metric {name!r}")
            self._gauge(metric).set(value, {RUN: self._run})

    def write_live(self, samples: Iterable[LiveSample]) -> None:
        self.write(self._record)
        for sample in samples:
            self._gauge(LIVE[sample.name]).set(sample.value, {RUN: self._run, **sample.labels})

    def close(self) -> None:
        """The series end with this process."""

    def _gauge(self, metric: Metric) -> Gauge:
        if metric.name not in self._gauges:
            self._gauges[metric.name] = Gauge(
                metric.prometheus, f"{metric.help} ({metric.unit})", (RUN, *metric.labels)
            )
        return self._gauges[metric.name]


class LiveExport:
    """Turns the controller's state into series at each tick, and counts the incidents that it sees in it."""

    def __init__(self, metrics: RayMetrics) -> None:
        self._metrics = metrics
        self._incidents = Incidents()

    def export(
        self,
        book: RunBook,
        bus: BusStats | None,
        state: RunState,
        stalled: Sequence[str],
        tracker_errors: Mapping[str, int],
        engine_dtype: str,
        now: float,
        faults: Mapping[str, int],
    ) -> None:
        """`faults`: incidents of the operations log, by fault.

        A value that its metric cannot take is left out, told, and an incident."""
        self._incidents.observe("stall", stalled)
        self._incidents.observe("role_lost", book.lost(now))
        self._incidents.observe("role_failed", [view.instance for view in book.views(now) if view.error])
        self._incidents.observe("tracker_failed", [name for name, errors in tracker_errors.items() if errors])
        live = LiveState(book, bus, state, bool(stalled), self._incidents, tracker_errors, engine_dtype, now, faults)
        samples, problems = check_live(live_samples(live))
        for series in self._incidents.observe("metric_refused", problems):
            logger.error("not exported: %s", problems[series])
        self._metrics.write_live(samples)


async def keep_endpoints(folder: RunFolder, run: str, ended: Callable[[], bool]) -> None:
    """The list of what Prometheus scrapes follows the nodes of the cluster, until the run has ended."""
    known: list[str] = []
    while not ended():
        try:
            found = await asyncio.wait_for(asyncio.to_thread(metrics_endpoints), ENDPOINTS_DEADLINE_S)
            if found != known:
                await asyncio.to_thread(folder.write_targets, found, run)
                known = found
        except (TimeoutError, RayError, RunFolderError) as error:
            logger.warning("metrics endpoints not listed: %s", error or type(error).__name__)
        await asyncio.sleep(ENDPOINTS_EVERY_S)


def metrics_endpoints() -> list[str]:
    """host:port of the metrics endpoint of each living node of this Ray."""
    return sorted(
        f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
        for node in ray.nodes()
        if node["Alive"] and node["MetricsExportPort"]
    )

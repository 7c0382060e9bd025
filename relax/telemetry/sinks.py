"""Where the record of a step goes: one call, every sink, the same values (B42).

report ─▶ checked ─▶ MetricSinks.write ─┬─ metrics.jsonl, Ray's metrics endpoint     at once; an error is the run's
                                        └─ trackers, each on a thread of its own     an error is counted and told
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from relax.telemetry.run_folder import RunFolder

logger = logging.getLogger("ray.serve")

BACKLOG_RECORDS = 1000
"""Steps that a slow tracker may lie behind before records are left out."""

Record = Mapping[str, float]


class Sink(Protocol):
    """Takes records that the table of metrics allows, in the order of the steps."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None:
        """Everything written is stored or sent when it returns."""


class RunFolderSink:
    """metrics.jsonl: the file that summary and report are made from."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def write(self, record: Record) -> None:
        self._folder.append_metrics(record)

    def close(self) -> None:
        """Each line is written when `write` returns."""


class Tracker:
    """A sink on a thread of its own: `write` never waits and never raises.

    What the sink raises, also on being made, costs that record, is counted in `errors` and kept in `last_error`.
    """

    def __init__(self, name: str, make: Callable[[], Sink], backlog: int = BACKLOG_RECORDS) -> None:
        self.name = name
        self.errors = 0
        self.last_error = ""
        self._make = make
        self._sink: Sink | None = None
        self._records: queue.Queue[Record | None] = queue.Queue(backlog)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        if self._closed.is_set():
            self._failed(f"is closed: step {record.get('step', 0):g} was left out")
            return
        try:
            self._records.put_nowait(dict(record))
        except queue.Full:
            self._failed(f"is {self._records.maxsize} records behind: step {record.get('step', 0):g} was left out")

    def close(self, deadline_s: float) -> None:
        """Wait for what was written; what takes longer is given up and counted."""
        self._closed.set()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._failed(f"did not end within {deadline_s:g} s")

    def _run(self) -> None:
        while (record := self._next()) is not None:
            self._guarded(lambda record=record: self._write(record))  # type: ignore[misc]
        if self._sink is not None:
            self._guarded(self._sink.close)

    def _next(self) -> Record | None:
        """None when closed and empty."""
        while True:
            try:
                return self._records.get(timeout=0.2)
            except queue.Empty:
                if self._closed.is_set():
                    return None

    def _write(self, record: Record) -> None:
        if self._sink is None:
            self._sink = self._make()
        self._sink.write(record)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # the border to a foreign library, which may raise anything: counted and told
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, why: str) -> None:
        self.errors += 1
        self.last_error = why
        logger.warning("tracker %s: %s", self.name, why)


class MetricSinks:
    """All sinks of a run."""

    def __init__(self, sinks: Sequence[Sink], trackers: Sequence[Tracker]) -> None:
        self._sinks, self.trackers = sinks, trackers

    def write(self, record: Record) -> None:
        """Raises what a sink raises that is no tracker."""
        for sink in self._sinks:
            sink.write(record)
        for tracker in self.trackers:
            tracker.write(record)

    def close(self, deadline_s: float) -> None:
        """`deadline_s`: for all trackers together."""
        for sink in self._sinks:
            sink.close()
        end = time.monotonic() + deadline_s
        for tracker in self.trackers:
            tracker.close(max(0.0, end - time.monotonic()))

    def troubles(self) -> dict[str, str]:
        """Tracker -> how often it failed and why the last time; those that did not are left out."""
        return {
            tracker.name: f"{tracker.errors} records or calls failed; the last: {tracker.last_error}"
            for tracker in self.trackers
            if tracker.errors
        }

"""The spans of one training step: of the step itself, and of each lease of samples in it."""

from __future__ import annotations

import time

from bus.records import Lease
from relax.telemetry.trace import PUBLISH, TRAIN, Tracer


class StepTrace:
    """`begin` per lease, then `trained` and `published`, once each; a step that is given up leaves no spans."""

    def __init__(self, tracer: Tracer, step: int) -> None:
        self._tracer, self._step = tracer, step
        self._begin_s = self._trained_s = time.time()
        self._leases: list[tuple[float, list[tuple[str, int]]]] = []

    def begin(self, lease: Lease) -> None:
        """Its rows go to the trainer now."""
        self._leases.append((time.time(), [(row.group_id, row.k) for row in lease.rows]))

    def trained(self) -> None:
        """The optimizer has made its step: it is the end of all samples in it."""
        self._trained_s = time.time()
        for begin_s, samples in self._leases:
            self._tracer.add(TRAIN, begin_s, self._trained_s, samples, step=self._step)

    def published(self, version: int) -> None:
        """The new version is committed, in DCS and in the bus."""
        end_s = time.time()
        samples = (sample for _, lease in self._leases for sample in lease)
        self._tracer.add(PUBLISH, self._trained_s, end_s, samples, step=self._step, version=version)
        self._tracer.add("step", self._begin_s, end_s, step=self._step, version=version)

"""Rollout workers with faults."""

from __future__ import annotations

import asyncio

from relax.rollout.base import WorkerContext
from relax.types import DataItem, Trajectory


class NeverAnswers:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    async def step(self, item: DataItem) -> Trajectory:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

"""Cost of a micro-batch after many rows have passed, over its cost on a bus that has seen none (`benchmarks.bus`).

The rows pass as in a run: admitted, generated, scored, judged, trained, collected, with partitions that rotate and a
manager that reads the events. Then a worn and a fresh bus in the same Ray take the same micro-batches in turn, so that
what else the machine does meets both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

Cycle = Callable[[], Awaitable[float]]
STEP_GROUPS = 64
GROUP = 8
TOKENS = 16
TRAIN_FIELDS = ("tokens", "loss_mask", "rollout_logprobs", "versions", "reward")
WARM_UP = 5


async def compare(worn: Cycle, fresh: Cycle, reps: int) -> tuple[float, float]:
    """Median seconds of a cycle on each, interleaved; each goes first every other time."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(WARM_UP + reps):
        order = ((0, worn), (1, fresh)) if number % 2 else ((1, fresh), (0, worn))
        for which, cycle in order:
            seconds = await cycle()
            if number >= WARM_UP:
                times[which].append(seconds)
    return statistics.median(times[0]), statistics.median(times[1])


class Passing:
    """Rows that go all the way through a bus and are freed, a training step at a time."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._step = 0
        self._seen = 0
        draw = np.random.default_rng(1)
        self._fields = {
            "tokens": draw.integers(0, 99, TOKENS).astype(np.int32),
            "loss_mask": np.ones(TOKENS, dtype=bool),
            "rollout_logprobs": -draw.random(TOKENS, dtype=np.float32),
            "versions": np.zeros(TOKENS, dtype=np.int32),
        }

    async def rows(self, count: int) -> int:
        """At least so many. Returns how many passed."""
        passed = 0
        while passed < count:
            passed += await self._one_step()
        return passed

    async def read_events(self) -> None:
        """As the manager does: what it has read, the bus may forget."""
        while events := await self._client.events(self._seen, wait_s=0.0):
            self._seen = events[-1].seq

    async def _one_step(self) -> int:
        from bus.records import GroupAdmission, LeaseRequest, RowPut, TrainedStep, Verdict, VerdictKind

        client, first = self._client, self._step * STEP_GROUPS
        self._step += 1
        ids = [f"passing:0:{first + i}" for i in range(STEP_GROUPS)]
        await client.admit([GroupAdmission(n, first + i, GROUP, 0, {"text": n}) for i, n in enumerate(ids)], 60)
        lease = await client.lease(LeaseRequest("rollout", ("prompt",), max_items=STEP_GROUPS), wait_s=60)
        rows = [
            RowPut(f"{group.group_id}/{k}/0", group.group_id, self._fields)
            for group in lease.groups
            for k in group.missing
        ]
        await client.put(rows, lease_id=lease.lease_id, deadline_s=60, ack=True)
        scored = await client.lease(LeaseRequest("reward", ("tokens",), max_items=len(rows)), wait_s=60)
        rewards = [RowPut(row.row_id, row.group_id, {"reward": 1.0, "accuracy": 1.0}) for row in scored.rows]
        await client.put(rewards, lease_id=scored.lease_id, deadline_s=60, ack=True)
        await client.judge([Verdict(name, VerdictKind.ACCEPTED) for name in ids])
        batch = await client.lease(LeaseRequest("actor", TRAIN_FIELDS, max_items=STEP_GROUPS), wait_s=60)
        if not len(rows) == len(rewards) == len(batch.rows):
            raise RuntimeError(f"{len(rows)} rows went in, {len(rewards)} were scored, {len(batch.rows)} came out")
        trained = TrainedStep(self._step, self._step, dict.fromkeys(ids, GROUP))
        await client.commit_step(trained, [batch.lease_id])
        await client.gc(self._step)
        await self.read_events()
        return len(rows)

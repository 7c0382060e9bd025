"""Samples are put as they finish; those that finish while a put is under way share the next one."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from bus.client import BusClient
from bus.records import RowPut

PUT_DEADLINE_S = 60.0


class PutBatcher:
    """One put in flight at a time per lease. Each `put` returns when its sample's rows are visible, or raises its put's
    error."""

    def __init__(self, bus: BusClient):
        self._bus = bus
        self._pending: dict[str, list[tuple[list[RowPut], asyncio.Future[None]]]] = defaultdict(list)
        self._running: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def put(self, rows: list[RowPut], lease_id: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending[lease_id].append((rows, future))
        if lease_id not in self._running:
            self._running.add(lease_id)
            task = asyncio.create_task(self._drain(lease_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await future

    async def _drain(self, lease_id: str) -> None:
        try:
            # A task starts a turn of the loop later: samples that just finished join this put.
            while batch := self._pending.pop(lease_id, []):
                try:
                    rows = [row for sample, _ in batch for row in sample]
                    await self._bus.put(rows, lease_id=lease_id, deadline_s=PUT_DEADLINE_S, ack=True)
                except Exception as error:  # passed on to each of those who wait for it
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(error)
                else:
                    for _, future in batch:
                        if not future.done():
                            future.set_result(None)
        finally:
            self._running.discard(lease_id)

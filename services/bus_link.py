"""A bus may be lost and made anew while its users go on: how they find the new one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from bus.client import BusClient
from bus.errors import BusTimeout, BusUnavailable
from bus.records import Caller
from relax.config.faults import Point
from services.runtime import RoleReporter

logger = logging.getLogger("ray.serve")
T = TypeVar("T")

REATTACH_DEADLINE_S = 120.0
"""The controller has to notice the loss and to start the processes again."""
BUS_LOSSES, BUS_TIMEOUTS = "bus_losses", "bus_timeouts"


class BusLink:
    """Of one client. `refill` runs after each new attachment, before anybody goes on."""

    def __init__(self, bus: BusClient, reporter: RoleReporter, refill: Callable[[], Awaitable[None]] | None = None):
        self.bus, self.reporter, self._refill = bus, reporter, refill
        self._one = asyncio.Lock()
        bus.on_stored(lambda: reporter.faults.passing(Point.MID_PUT))

    async def rejoin(self, lost: Caller) -> None:
        """After `BusUnavailable` where we were `lost`. Tasks that noticed it together attach once.

        Raises `BusUnavailable` when no new bus comes within the deadline, `BusTimeout` once the run is stopped.
        """
        async with self._one:
            if self.bus.caller != lost:
                return
            self.reporter.count(BUS_LOSSES)
            logger.warning("%s: the bus is gone, waiting for the next one", self.reporter.instance)
            await self.bus.reattach(lost, deadline_s=REATTACH_DEADLINE_S)
            while True:
                attached = self.bus.caller
                try:
                    if self._refill is not None:
                        await self._refill()
                    return
                except BusTimeout:
                    self._count_timeout()
                except BusUnavailable:  # lost again meanwhile
                    await self.bus.reattach(attached, deadline_s=REATTACH_DEADLINE_S)

    async def until_done(self, work: Callable[[], Awaitable[T]]) -> T:
        """`work` again after each loss and each call without an answer; it must be one that may be repeated."""
        while True:
            here = self.bus.caller
            try:
                return await work()
            except BusUnavailable:
                await self.rejoin(here)
            except BusTimeout:
                self._count_timeout()

    def _count_timeout(self) -> None:
        """In an `except`: tried again, but by a run that has stopped."""
        self.reporter.count(BUS_TIMEOUTS)
        if self.reporter.stopped.is_set():
            raise

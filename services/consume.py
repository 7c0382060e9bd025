"""The loop of a role that takes rows from the bus, adds fields, and acknowledges."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from bus.client import BusClient
from bus.errors import BusError, BusTimeout, BusUnavailable, LeaseLost
from bus.records import Closed, Empty, Lease, LeaseRequest
from relax.config.faults import Point
from relax.telemetry.time_split import WAIT_DATA, WORK
from services.bus_link import BUS_TIMEOUTS, BusLink
from services.runtime import RoleReporter

LONG_POLL_S = 2.0
"""How long one lease call waits in the bus: also how late a stop is noticed."""
REOPENED_POLL_S = 1.0
"""How often a task that was closed is asked for again."""


async def stopped_within(reporter: RoleReporter, seconds: float) -> bool:
    """Whether the run was stopped before so many seconds were over."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reporter.stopped.wait(), seconds)
    return reporter.stopped.is_set()


@contextlib.asynccontextmanager
async def holding(bus: BusClient, lease: Lease) -> AsyncIterator[None]:
    """Acknowledge a kept lease on a clean exit; release it on an exception, which is the error to report."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(BusError):
            await bus.release(lease.lease_id, type(error).__name__)
        raise
    await bus.ack(lease.lease_id)


async def consume(
    bus: BusClient,
    request: LeaseRequest,
    reporter: RoleReporter,
    handle: Callable[[Lease], Awaitable[None]],
    on_closed: Callable[[bool], Awaitable[None]] | None = None,
) -> None:
    """Until the run stops. `on_closed` hears when the bus closes the task, and when it opened it again: after the
    trainer went back to an older state the last groups may have to be made once more.

    An exception in `handle` releases the lease and passes on, unless it is of the bus: a lost lease, an unanswered
    call and a lost bus are counted, and the work goes on with what is leased next.
    """
    link = BusLink(bus, reporter)
    closed = False

    async def tell(now_closed: bool) -> None:
        nonlocal closed
        if on_closed is not None and now_closed != closed:
            await on_closed(now_closed)
        closed = now_closed

    while not reporter.stopped.is_set():
        reporter.waiting_for = "" if closed else f"rows ready for {request.task}"
        here = bus.caller
        try:
            with reporter.time_split.book(WAIT_DATA):
                lease = await bus.lease(request, wait_s=LONG_POLL_S, keep=True)
            if isinstance(lease, Closed):
                await tell(True)
                await stopped_within(reporter, REOPENED_POLL_S)
                continue
            if isinstance(lease, Empty):
                continue
            await tell(False)
            reporter.waiting_for = ""
            async with holding(bus, lease):
                reporter.faults.passing(Point.AFTER_LEASE)
                with reporter.time_split.book(WORK):
                    await handle(lease)
                reporter.faults.passing(Point.BEFORE_ACK)
            reporter.count("rows", len(lease.rows))
        except LeaseLost:
            reporter.count("leases_lost")
        except BusTimeout:
            reporter.count(BUS_TIMEOUTS)
        except BusUnavailable:
            await link.rejoin(here)

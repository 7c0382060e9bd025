"""The loop of a role that takes rows from the bus, adds fields, and acknowledges."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from bus.client import BusClient
from bus.errors import BusError, BusTimeout
from bus.records import AckResult, Closed, Empty, Lease, LeaseRequest
from relax.telemetry.time_split import WAIT_DATA, WORK
from relax.types import PolicyVersion
from services.runtime import RoleReporter

LONG_POLL_S = 2.0
"""How long one lease call waits in the bus: also how late a stop is noticed."""

COMMIT_ATTEMPTS = 3


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


async def commit_step(
    bus: BusClient,
    lease_ids: Sequence[str],
    *,
    version: PolicyVersion,
    step: int,
    on_repeat: Callable[[], None],
) -> AckResult:
    """Commit a trained step; repeated when no answer came, as the bus knows a step that it has committed.

    `on_repeat` is called before each repetition. Raises `BusTimeout` after `COMMIT_ATTEMPTS` unanswered calls.
    """
    for _ in range(COMMIT_ATTEMPTS - 1):
        try:
            return await bus.commit_step(lease_ids, version=version, step=step)
        except BusTimeout:
            on_repeat()
    return await bus.commit_step(lease_ids, version=version, step=step)


async def consume(
    bus: BusClient,
    request: LeaseRequest,
    reporter: RoleReporter,
    handle: Callable[[Lease], Awaitable[None]],
) -> None:
    """Until the bus closes the task or the run stops. An exception in `handle` releases the lease and passes on."""
    while not reporter.stopped.is_set():
        reporter.waiting_for = f"rows ready for {request.task}"
        with reporter.time_split.book(WAIT_DATA):
            lease = await bus.lease(request, wait_s=LONG_POLL_S, keep=True)
        if isinstance(lease, Closed):
            return
        if isinstance(lease, Empty):
            continue
        reporter.waiting_for = ""
        async with holding(bus, lease):
            with reporter.time_split.book(WORK):
                await handle(lease)
        reporter.count("rows", len(lease.rows))

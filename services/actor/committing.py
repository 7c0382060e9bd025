"""How a step that the actor has taken becomes one that the bus counts, whatever happens to leases and bus meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from bus.client import BusClient
from bus.errors import BusError, BusTimeout, BusUnavailable, LeaseLost
from bus.records import AckResult, TrainedStep
from services.bus_link import BUS_TIMEOUTS, BusLink
from services.runtime import RoleReporter


async def hold_on(bus: BusClient, reporter: RoleReporter, lease_ids: Sequence[str]) -> None:
    """Before a step is taken: its leases must still be ours.

    A process that stood still for longer than they live may have been given the same groups once more, and would train
    them twice in one step. Raises `LeaseLost`, and has then handed back what is left.
    """
    try:
        # Side by side: each lives from now on for as long as the others.
        await asyncio.gather(*(_extend(bus, reporter, lease_id) for lease_id in lease_ids))
    except LeaseLost:
        reporter.count("leases_lost")
        await _hand_back(bus, lease_ids, "step_discarded")
        raise


async def commit_step(
    bus: BusClient,
    link: BusLink,
    reporter: RoleReporter,
    trained: TrainedStep,
    lease_ids: Sequence[str],
) -> AckResult:
    """Of a step that is in the weights, from what these leases gave. Repeated when no answer came: the bus knows a step
    that it has committed. Who is attached to another bus has told it of the step.

    Raises `BusTimeout` once the run is stopped.
    """
    while True:
        here = bus.caller
        try:
            return await bus.commit_step(trained, lease_ids)
        except BusTimeout:
            reporter.count("commits_repeated")
            if reporter.stopped.is_set():
                raise
        except BusUnavailable:
            await link.rejoin(here)  # which tells the next bus
            return AckResult(len(trained.groups))


async def _hand_back(bus: BusClient, lease_ids: Sequence[str], reason: str) -> None:
    """Those that are left; who does not hear of it lets them expire."""
    for lease_id in lease_ids:
        with contextlib.suppress(BusError):
            await bus.release(lease_id, reason)


async def _extend(bus: BusClient, reporter: RoleReporter, lease_id: str) -> None:
    while True:
        try:
            await bus.extend(lease_id)
            return
        except BusTimeout:
            reporter.count(BUS_TIMEOUTS)
            if reporter.stopped.is_set():
                raise

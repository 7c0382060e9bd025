"""The controller owns the run's bus: it adopts the one that an earlier controller made, watches it, makes it anew."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

from bus.client import BusClient
from bus.errors import BusError, BusTimeout, BusUnavailable
from bus.lifecycle import bus_address, create_bus, destroy_bus, ping
from bus.records import BusStats
from relax.config.sections import ControllerArgs
from services import names

logger = logging.getLogger("ray.serve")

PING_S = 1.0
START_S = 60.0
FIND_S = 10.0


class BusOwner:
    """`start` before anything else; `stats` is the last snapshot, of the time `stats_at` (monotonic)."""

    def __init__(self, args: ControllerArgs, run_id: str) -> None:
        self.args = args
        self._run_id, self._namespace = run_id, names.namespace(args.run.name)
        self.address = bus_address(run_id, self._namespace, args.run.bus)
        self.stats: BusStats | None = None
        self.stats_at = -math.inf
        self._client: BusClient | None = None
        self._renewing = asyncio.Lock()
        self._given_up: str | None = None

    @property
    def client(self) -> BusClient:
        if self._client is None:
            raise BusUnavailable("the run has ended: it has no bus")
        return self._client

    async def start(self) -> bool:
        """Connect to the run's bus, made now unless it is there. True if it was there."""
        found = await self._find()
        if not found:
            await asyncio.to_thread(destroy_bus, self.address)  # half a bus may be left
            await self._create()
        await self._connect()
        return found

    async def attach(self) -> None:
        """After the end of the run: connect if its bus is there still."""
        if await self._find():
            await self._connect()

    async def _find(self) -> bool:
        """A bus that is slow to answer is there: it is given as long as any other silence of it."""
        end = time.monotonic() + self.args.controller.bus_silence_s
        while True:
            try:
                epoch = await asyncio.to_thread(ping, self.address, FIND_S)
            except BusUnavailable as error:
                logger.warning("no bus to adopt: %s", error)
                return False
            except BusTimeout as error:
                logger.warning("the bus is slow to answer: %s", error)
                if time.monotonic() >= end:
                    return False
                continue
            logger.warning("adopting the bus of epoch %s", epoch)
            return True

    async def _create(self) -> None:
        run = self.args.run
        await asyncio.to_thread(
            create_bus,
            self._run_id,
            self._namespace,
            run.bus,
            run.max_tokens,
            top_k=run.teacher_top_k,
            complete_fields=("reward",) if run.generates else ("tokens",),
        )

    async def _connect(self) -> None:
        self._client = await BusClient.connect(
            self.address,
            owner=names.CONTROLLER,
            role=names.CONTROLLER,
            config=self.args.run.bus,
            deadline_s=START_S,
            rows=False,
        )

    async def watch(self, ended: Callable[[], bool], on_loss: Callable[[str], Awaitable[None]]) -> None:
        """Until the run has ended: `on_loss(why)` when a process of the bus is dead, or it is silent for too long."""
        heard_at = time.monotonic()
        while not ended():
            try:
                await self.client.ping()
                if self._given_up is not None:
                    raise BusUnavailable(self._given_up)
            except (BusUnavailable, BusTimeout) as error:
                silent_s = time.monotonic() - heard_at
                if isinstance(error, BusTimeout) and silent_s < self.args.controller.bus_silence_s:
                    continue
                if not ended() and not self._renewing.locked():  # else it was taken down, or is being made anew
                    await on_loss(str(error))
            heard_at = time.monotonic()
            await asyncio.sleep(PING_S)

    def give_up(self, epoch: str, why: str) -> None:
        """The manager cannot go on with the bus of this epoch: `watch` takes it for lost. Not one that came since."""
        if self.client.caller.epoch == epoch:
            self._given_up = why

    async def renew(self) -> None:
        """Make it anew under the same names, empty and of another epoch; its users find it by name."""
        async with self._renewing:
            lost = self.client.caller
            await asyncio.to_thread(destroy_bus, self.address)
            self._given_up = None
            await self._create()
            await self.client.reattach(lost, deadline_s=START_S)

    async def refresh(self) -> None:
        """Raises `BusError`."""
        self.stats = await self.client.stats()
        self.stats_at = time.monotonic()

    async def try_refresh(self) -> bool:
        """False, and told, when the bus does not answer: the last snapshot has to do."""
        try:
            await self.refresh()
        except BusError as error:
            logger.warning("no statistics of the bus: %s", error)
            return False
        return True

    async def destroy(self) -> None:
        """At the end of the run."""
        if self._client is not None:
            await self._client.close()
        await asyncio.to_thread(destroy_bus, self.address)

"""The actor's state: a snapshot in host memory after each step, and checkpoints that are saved from one.

take   after the optimizer step, before anything is told of it       one copy in memory
save   the snapshot is held, DCS copies it to disk                   beside the training thread
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from ray.serve.exceptions import RayServeException

from relax.checkpoint.snapshot import Snapshot
from relax.checkpoint.store import reading
from relax.training.base import Critic, TrainingBackend
from relax.training.snapshot import SnapshotWriter
from relax.training.state import CRITIC, POLICY, TrainerState, join_states, part_of, read_state
from relax.types import Json, RelaxError
from relax.weights.space import NoSpace
from services import names
from services.bus_link import BusLink
from services.dcs.api import SavedState
from services.runtime import RoleReporter, call

logger = logging.getLogger("ray.serve")

SAVE_DEADLINE_S = 300.0
"""For DCS to copy, digest and flush one checkpoint."""


SaveOnDisk = Callable[[int, str], Awaitable[None]]
"""Makes the snapshot of a step, in a buffer that is held meanwhile, a checkpoint."""


async def _by_dcs(step: int, buffer: str) -> None:
    await call(names.DCS, "save_snapshot", step, buffer, deadline_s=SAVE_DEADLINE_S)


class StateKeeper:
    """Called by the training thread; `loop` is the replica's. Checkpoints are DCS's by default."""

    def __init__(
        self,
        policy: TrainingBackend,
        critic: Critic | None,
        root: Path,
        link: BusLink,
        reporter: RoleReporter,
        loop: asyncio.AbstractEventLoop,
        save_on_disk: SaveOnDisk | None = None,
        reserve_bytes: int = 0,
    ) -> None:
        self._save_on_disk = save_on_disk or _by_dcs
        self._policy, self._critic = policy, critic
        self._writer = SnapshotWriter(root, reserve_bytes)
        self._link, self._reporter, self._loop = link, reporter, loop
        self._newest: Snapshot | None = None
        self._saving: tuple[Snapshot, Future[None]] | None = None
        self.saved: int | None = None
        """Step of the newest checkpoint that was saved or loaded."""

    def load(self, saved: SavedState) -> None:
        """Raises `ModelError` when it is not a state of these models."""
        folder = Path(saved.folder)
        with contextlib.nullcontext() if saved.in_memory else reading(folder):
            state = read_state(folder)
        self._policy.load_state(part_of(state, POLICY), saved.folder)
        if self._critic is not None:
            self._critic.load_state(part_of(state, CRITIC), saved.folder)
        if not saved.in_memory:
            self.saved = saved.step

    def take(self, step: int, meta: Mapping[str, Json]) -> None:
        """A snapshot of the state after `step`. When the memory is full that is counted, and training goes on."""
        self._release_saved()
        begin = time.perf_counter()
        try:
            self._newest = self._writer.take(self._state(), step, meta)
        except (NoSpace, OSError) as error:
            self._newest = None
            self._reporter.count("snapshots_failed")
            self._reporter.facts["snapshot_error"] = str(error)
            logger.error("no snapshot of step %d: %s", step, error)
        else:
            self._reporter.count("snapshots")
            self._reporter.count("snapshot_s", time.perf_counter() - begin)

    def save(self, step: int, meta: Mapping[str, Json]) -> None:
        """Begin a checkpoint of the state after `step`; one at a time. A failed one is counted and told: the run goes
        on from the last good state (B47)."""
        self.finish()
        if self._newest is None or self._newest.step != step:
            self.take(step, meta)
        if self._newest is None:
            self._failed(step, f"there is no snapshot to save: {self._reporter.facts.get('snapshot_error')}")
            return
        self._writer.hold(self._newest)
        work = asyncio.run_coroutine_threadsafe(self._save(self._newest), self._loop)
        self._saving = (self._newest, work)

    def finish(self) -> None:
        """Wait for the checkpoint that is being saved."""
        if self._saving is not None:
            self._saving[1].result()
            self._release_saved()

    def _state(self) -> TrainerState:
        parts = {POLICY: self._policy.state()}
        if self._critic is not None:
            parts[CRITIC] = self._critic.state()
        return join_states(parts)

    def _release_saved(self) -> None:
        if self._saving is not None and self._saving[1].done():
            self._writer.release(self._saving[0])
            self._saving = None

    async def _save(self, snapshot: Snapshot) -> None:
        begin_s = time.time()
        try:
            await self._save_on_disk(snapshot.step, snapshot.buffer)
        except (RelaxError, OSError, RayServeException) as error:
            self._failed(snapshot.step, str(error))
            return
        self._reporter.trace.add("checkpoint", begin_s, time.time(), step=snapshot.step)
        self.saved = snapshot.step
        # Trained rows are kept until the checkpoint that covers them.
        await self._link.until_done(lambda: self._link.bus.gc(snapshot.step))

    def _failed(self, step: int, error: str) -> None:
        self._reporter.count("checkpoints_failed")
        self._reporter.facts["checkpoint_error"] = error
        logger.error("checkpoint at step %d failed: %s", step, error)

"""DCS: commits published weights, tells instances of new versions, keeps checkpoints."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import ray
from ray import serve

from relax.checkpoint.snapshot import copy_snapshot, newest_snapshot, read_snapshot
from relax.checkpoint.store import CheckpointStore
from relax.config.faults import Point
from relax.config.sections import DcsArgs
from relax.control.lineage import Published
from relax.telemetry.time_split import WORK
from relax.types import PolicyVersion, RelaxError
from relax.weights.manifest import CorruptWeights
from relax.weights.store import WeightStore, version_folder
from relax.weights.tcp_server import WeightServer
from services import names
from services.dcs.api import PublishedVersion, PublishTicket, SavedState, StorePlace
from services.dcs.versions import VersionLine, VersionTable
from services.runtime import RoleReporter, call_when_up, run_folder_path

logger = logging.getLogger("ray.serve")
P = ParamSpec("P")
T = TypeVar("T")

REFERENCE = "reference"
"""Folder in the run folder with version 0: the reference policy."""


def weights_root(args: DcsArgs, run_id: str) -> Path:
    """Memory-backed folder of this run."""
    return Path(args.dcs.shm_dir) / f"relax-{args.run.name}-{run_id}"


def snapshots_root(args: DcsArgs, run_id: str) -> Path:
    """Memory-backed folder of the actor's state in this run."""
    root = weights_root(args, run_id)
    return root.with_name(f"{root.name}-state")


@serve.deployment(
    max_ongoing_requests=1000,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=5,
    graceful_shutdown_wait_loop_s=0.2,
)
class Dcs:
    """Staging is the actor's: it writes buckets and digests below `begin_publish().root`. Commit is ours:
    every tensor is verified, then one rename makes the version visible and wakes the waiting instances."""

    async def __init__(self, args: DcsArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        self.args = args
        self.reporter = RoleReporter(names.DCS, names.DCS, args.run)
        info = await self.reporter.join(args.dcs.model_dump(mode="json"))
        self.run_dir = run_folder_path(args.run)
        self.weights = WeightStore(
            weights_root(args, info.run_id), keep=args.dcs.keep_versions, reserve_bytes=args.dcs.reserve_bytes
        )
        self.snapshots = snapshots_root(args, info.run_id)
        self.server: WeightServer | None = None
        if args.dcs.transport != "shared_memory":
            self.server = WeightServer(self.weights, args.dcs.host, args.dcs.transfer_deadline_s)
            self.reporter.refresh = self._refresh_counts
        self.place = StorePlace(
            node_id=ray.get_runtime_context().get_node_id(),
            root=str(self.weights.root),
            keep=args.dcs.keep_versions,
            reserve_bytes=args.dcs.reserve_bytes,
            transport=args.dcs.transport,
            source=self.server.source if self.server else None,
        )
        self.checkpoints = CheckpointStore(
            self.run_dir / "checkpoints", keep=args.dcs.keep_checkpoints, reserve_bytes=args.dcs.reserve_bytes
        )
        self.versions = await asyncio.to_thread(VersionTable, self.run_dir)
        self.published: PublishedVersion | None = None
        self.pinned: PublishedVersion | None = None
        self._changed = asyncio.Condition()
        self._restore_published()
        self.reporter.state = "running"

    def _restore_published(self) -> None:
        """After a restart the folder is the truth: the newest visible version is published again."""
        manifest = self.weights.latest()
        if manifest is not None:
            self.published = self._describe(PolicyVersion(manifest.version), manifest.step, manifest.digest, {})
            self.reporter.facts["version"] = int(manifest.version)

    def _describe(self, version: PolicyVersion, step: int, digest: str, probe: dict[str, Any]) -> PublishedVersion:
        folder = version_folder(self.weights.root, version)
        return PublishedVersion(int(version), step, str(folder), digest, self.place, probe)

    def _refresh_counts(self) -> None:
        assert self.server is not None
        self.reporter.counters.update({f"tcp_{what}": float(count) for what, count in self.server.counted().items()})

    async def check_health(self) -> None:
        self.reporter.check()

    async def _work(self, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In a thread, booked as work and traced."""
        begin_s = time.time()
        with self.reporter.time_split.book(WORK):
            result = await asyncio.to_thread(function, *args, **kwargs)
        self.reporter.trace.add(name, begin_s, time.time())
        return result

    async def begin_publish(self) -> PublishTicket:
        newest = self.versions.newest
        return PublishTicket(
            root=str(self.weights.root),
            snapshots=str(self.snapshots),
            bucket_bytes=self.args.dcs.bucket_bytes,
            node_id=self.place.node_id,
            newest=None if newest is None else Published(newest.version, newest.step),
            reserve_bytes=self.args.dcs.reserve_bytes,
        )

    async def store_place(self) -> StorePlace:
        return self.place

    async def commit_publish(self, staging: str, probe: dict[str, Any]) -> PublishedVersion:
        """Raises `CorruptWeights` and publishes nothing when a tensor differs from its digest (B2, B4)."""

        def commit() -> PublishedVersion:
            manifest = self.weights.commit(self.weights.staged(staging), faults=self.args.run.faults)
            self.reporter.faults.passing(Point.DCS_MID_PUBLISH)
            version = PolicyVersion(manifest.version)
            if version == 0:
                self._keep_reference()
            self.versions.add(VersionLine(version, manifest.step, manifest.digest))
            return self._describe(version, manifest.step, manifest.digest, probe)

        try:
            published = await self._work("commit", commit)
        except CorruptWeights:
            self.reporter.count("publications_refused")
            raise
        async with self._changed:
            self.published = published
            self._changed.notify_all()
        self.reporter.count("publications")
        self.reporter.facts["version"] = published.version
        return published

    def _keep_reference(self) -> None:
        source = version_folder(self.weights.root, PolicyVersion(0))
        target = self.run_dir / REFERENCE
        if target.exists():
            return
        partial = target.with_name(f".{REFERENCE}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        partial.rename(target)

    async def wait_newer(self, than: int, wait_s: float) -> PublishedVersion | None:
        """Long poll: the newest version above `than`, or None after `wait_s`."""

        def newer() -> bool:
            return self.published is not None and self.published.version > than

        async with self._changed:
            if not newer():  # a wait of 0 s would not even look
                try:
                    await asyncio.wait_for(self._changed.wait_for(newer), wait_s)
                except TimeoutError:
                    return None
            return self.published

    async def pin_newest(self) -> PublishedVersion | None:
        """The newest version, kept until `unpin`; None before the first."""
        published = self.published
        if published is not None:
            self.weights.pin(PolicyVersion(published.version))
            self.pinned = published
        return published

    async def newest_pinned(self) -> PublishedVersion | None:
        """What an evaluator that comes up takes: the version of the round that is under way, else the newest."""
        return self.pinned or self.published

    async def unpin(self, version: int) -> None:
        if self.pinned is not None and self.pinned.version == version:
            self.pinned = None
        self.weights.unpin(PolicyVersion(version))

    async def save_snapshot(self, step: int, buffer: str) -> SavedState:
        """Make the snapshot in this buffer, which its writer holds meanwhile, a checkpoint on disk.

        Adds the manager's ledger position. Raises `NoSpace` before anything is written, or when the disk fills;
        earlier checkpoints stay good (B47).
        """
        position = await call_when_up(names.ROLLOUT, "ledger_position", deadline_s=30.0)
        try:
            saved = await self._work("checkpoint", self._save, step, buffer, position)
        except (RelaxError, OSError) as error:
            self.reporter.count("checkpoints_failed")
            logger.error("checkpoint of step %d failed: %s", step, error)
            raise
        self.reporter.count("checkpoints")
        return saved

    def _save(self, step: int, buffer: str, position: dict[str, Any]) -> SavedState:
        snapshot = read_snapshot(self.snapshots / buffer)
        if snapshot is None or snapshot.step != step:
            raise RelaxError(f"{self.snapshots / buffer} holds no snapshot of step {step}")
        meta = {**snapshot.meta, "ledger": position}

        def write(folder: Path) -> None:
            copy_snapshot(snapshot, folder)
            self.reporter.faults.passing(Point.MID_SAVE)

        manifest = self.checkpoints.save(step, write, meta, expected_bytes=snapshot.n_bytes)
        return SavedState(step, str(self.checkpoints.folder(manifest)), meta)

    async def newest_state(self) -> SavedState | None:
        """What an actor that comes up goes on from: the newest snapshot, else the newest whole checkpoint, its files
        compared with their digests (B13)."""
        return await self._work("restore", self._newest_state)

    def _newest_state(self) -> SavedState | None:
        snapshot = newest_snapshot(self.snapshots)
        if snapshot is not None:
            return SavedState(snapshot.step, str(snapshot.folder), snapshot.meta, in_memory=True)
        found = self.checkpoints.restore_latest()
        if found is None:
            return None
        manifest, folder = found
        return SavedState(manifest.step, str(folder), dict(manifest.meta))

    async def remove_weights(self) -> None:
        """End of the run: nothing stays in shared memory."""
        if self.server is not None:
            await asyncio.to_thread(self.server.close)
        for folder in (self.weights.root, self.snapshots):
            await asyncio.to_thread(shutil.rmtree, folder, True)
        self.reporter.state = "stopped"

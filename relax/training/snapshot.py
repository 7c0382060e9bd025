"""Writes snapshots of a trainer's state into memory: `relax.checkpoint.snapshot` says how they lie there."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from relax.checkpoint.manifest import SNAPSHOT_BUFFERS, TENSORS
from relax.checkpoint.snapshot import MANIFEST, SCHEMA, Snapshot, newest_snapshot, read_snapshot
from relax.training.state import StateLayout, TrainerState, write_facts
from relax.types import Json
from relax.weights.space import check_space

_REMEDY = (
    "give dcs.shm_dir more memory, or lower dcs.reserve_bytes; training goes on without snapshots, and an actor that "
    "dies goes on from its last checkpoint"
)


class SnapshotWriter:
    """Of one trainer. The first `take` maps the buffers and touches their memory; later ones only copy.

    `reserve_bytes` must stay free in that memory.
    """

    def __init__(self, root: Path, reserve_bytes: int = 0) -> None:
        self.root, self.reserve_bytes = root, reserve_bytes
        self._buffers: list[_Buffer] = []
        newest = newest_snapshot(root)
        self._serial = 0 if newest is None else newest.serial
        self._held: set[str] = set()

    def take(self, state: TrainerState, step: int, meta: Mapping[str, Json]) -> Snapshot:
        """Copy the state. Raises `NoSpace` before the first, when the memory has no room for all buffers, and `OSError`
        when a file cannot be written; the snapshots before stay whole."""
        if not self._buffers:
            layout = StateLayout.of(state)
            self._check_room(layout.n_bytes)
            self._buffers = [_Buffer(self.root / f"buffer-{number}", layout) for number in range(SNAPSHOT_BUFFERS)]
        free = [buffer for buffer in self._buffers if buffer.folder.name not in self._held]
        buffer = min(free, key=lambda one: one.serial)
        self._serial += 1
        return buffer.fill(state, self._serial, step, meta)

    def _check_room(self, n_bytes: int) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        there = [
            path.stat().st_blocks * 512 for path in self.root.glob(f"buffer-*/{TENSORS}")
        ]  # taken over, or replaced
        need = max(0, SNAPSHOT_BUFFERS * n_bytes - sum(there))
        check_space("snapshots of the actor's state", self.root, need, self.reserve_bytes, _REMEDY)

    def hold(self, snapshot: Snapshot) -> None:
        """Do not overwrite it until `release`. Raises `ValueError` when too few buffers would be left."""
        if len(self._held | {snapshot.buffer}) > SNAPSHOT_BUFFERS - 2:
            raise ValueError(f"{len(self._held)} of {SNAPSHOT_BUFFERS} buffers are held, no more may be")
        self._held.add(snapshot.buffer)

    def release(self, snapshot: Snapshot) -> None:
        self._held.discard(snapshot.buffer)

    def clear(self) -> None:
        """Forget all that were taken: the trainer went back to an older state."""
        for folder in self.root.glob("buffer-*"):
            (folder / MANIFEST).unlink(missing_ok=True)


class _Buffer:
    """One mapped file. `serial` of what it holds, 0 for nothing."""

    def __init__(self, folder: Path, layout: StateLayout) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        whole = read_snapshot(folder)
        self.serial = 0 if whole is None else whole.serial
        path = folder / TENSORS
        if whole is None or not _begins_with(path, layout):
            self._forget()
            path.unlink(missing_ok=True)
        with open(path, "a+b") as file:
            os.posix_fallocate(file.fileno(), 0, layout.n_bytes)  # a full memory is told here, not by a signal later
            self._map = mmap.mmap(file.fileno(), layout.n_bytes)
        memory = np.frombuffer(self._map, dtype=np.uint8)
        if not self.serial:
            memory[len(layout.head) :] = 0  # touched now, and not in the middle of training
        memory[: len(layout.head)] = np.frombuffer(layout.head, dtype=np.uint8)
        self._views: dict[str, Tensor] = layout.views(torch.from_numpy(memory))

    def fill(self, state: TrainerState, serial: int, step: int, meta: Mapping[str, Json]) -> Snapshot:
        self._forget()
        for name, view in self._views.items():
            view.copy_(state.tensors[name])
        write_facts(state.facts, self.folder)
        body = {"schema": SCHEMA, "serial": serial, "step": step, "meta": dict(meta)}
        staged = self.folder / f".{MANIFEST}"
        staged.write_text(json.dumps(body))
        staged.rename(self.folder / MANIFEST)
        self.serial = serial
        return Snapshot(self.folder, serial, step, dict(meta))

    def _forget(self) -> None:
        self.serial = 0
        (self.folder / MANIFEST).unlink(missing_ok=True)


def _begins_with(path: Path, layout: StateLayout) -> bool:
    with open(path, "rb") as file:
        return path.stat().st_size == layout.n_bytes and file.read(len(layout.head)) == layout.head

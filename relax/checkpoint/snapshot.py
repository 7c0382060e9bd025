"""The trainer's newest state in host memory: a trainer that died goes on from it, without a disk.

    <root>/buffer-0/state.safetensors, state.json     overwritten in place; mapped once, so a step costs one copy
    <root>/buffer-0/snapshot.json                     renamed into place when the copy is whole, removed before the next
    <root>/buffer-1/ ...

One trainer writes, into the buffer that is oldest and not held; so the newest whole one survives a crash in the middle
of a copy, and a held one can be saved to disk meanwhile. With three buffers one may be held.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from relax.checkpoint.manifest import FACTS, TENSORS
from relax.types import Json

MANIFEST = "snapshot.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole one. `serial` grows with each that is written; `meta` is the writer's."""

    folder: Path
    serial: int
    step: int
    meta: dict[str, Json]

    @property
    def buffer(self) -> str:
        return self.folder.name

    @property
    def n_bytes(self) -> int:
        """Of its files."""
        return sum((self.folder / name).stat().st_size for name in (TENSORS, FACTS))


def read_snapshot(folder: Path) -> Snapshot | None:
    """None where none is whole."""
    try:
        body = json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, ValueError):
        return None
    if body.get("schema") != SCHEMA:
        return None
    return Snapshot(folder, body["serial"], body["step"], body["meta"])


def newest_snapshot(root: Path) -> Snapshot | None:
    """The last whole one below `root`."""
    found = [snapshot for folder in sorted(root.glob("buffer-*")) if (snapshot := read_snapshot(folder)) is not None]
    return max(found, key=lambda snapshot: snapshot.serial, default=None)


def copy_snapshot(snapshot: Snapshot, target: Path) -> None:
    """Its files into an existing folder, as `read_state` reads them."""
    for name in (TENSORS, FACTS):
        shutil.copyfile(snapshot.folder / name, target / name)

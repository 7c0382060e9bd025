"""What makes a checkpoint whole, and the errors of this package. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from relax.types import RelaxError

SCHEMA_VERSION: Literal[1] = 1
TENSORS, FACTS = "state.safetensors", "state.json"
"""Files of a trainer's state (`relax.training.state`)."""
SNAPSHOT_BUFFERS = 3
"""Copies of the trainer's state in host memory: the newest, the one that is being written, and one that is saved."""
MANIFEST_NAME = "manifest.json"
DIGEST_BYTES = 16


class CheckpointError(RelaxError):
    """Base of the errors of checkpoints."""


class CorruptCheckpoint(CheckpointError):
    """A file of a checkpoint is missing or differs from its manifest; the message names it."""


class CheckpointSchemaError(CheckpointError):
    """A checkpoint was written with another schema version; the message says which, and what to do."""


class FileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    n_bytes: Annotated[int, Field(ge=0)]
    digest: str
    """blake2b-128 of the content."""


class CheckpointManifest(BaseModel):
    """`serial` counts saves and orders checkpoints; `step` may go back after a rollback."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = SCHEMA_VERSION
    serial: Annotated[int, Field(ge=0)]
    step: Annotated[int, Field(ge=0)]
    meta: dict[str, Any]
    """The caller's: trained frontier, ledger position, lineage, versions, ..."""
    files: dict[str, FileEntry]
    """By path relative to the checkpoint's folder."""

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.files.values())


def file_entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()
    return FileEntry(n_bytes=path.stat().st_size, digest=digest)

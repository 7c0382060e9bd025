"""The manifest of one published version, and the errors of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relax.types import PolicyVersion, RelaxError

SCHEMA_VERSION: Literal[1] = 1
MANIFEST_NAME = "manifest.json"


class WeightsError(RelaxError):
    """Base of the errors of published weights."""


class CorruptWeights(WeightsError):
    """Stored tensors differ from their manifest; the message names the first that do."""


class VersionGone(WeightsError):
    """The version was collected (or never published): take the newest instead."""


class StaleVersion(WeightsError):
    """A version that is not newer than the newest published one: versions only grow (B10)."""


class TensorEntry(BaseModel):
    """Where one tensor lies and what it must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bucket: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


class Manifest(BaseModel):
    """What a version holds. `digest` covers all tensors, see `relax.weights.digest`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = SCHEMA_VERSION
    version: Annotated[PolicyVersion, Field(ge=0)]
    step: Annotated[int, Field(ge=0)]
    lineage: Annotated[int, Field(ge=0)] = 0
    digest: str
    n_bytes: Annotated[int, Field(ge=0)]
    tensors: dict[str, TensorEntry]

    @property
    def buckets(self) -> tuple[str, ...]:
        return tuple(sorted({entry.bucket for entry in self.tensors.values()}))


def read_manifest(folder: Path) -> Manifest:
    """Raises `VersionGone` if there is none, `CorruptWeights` if it cannot be read."""
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise VersionGone(f"no published version at {folder}") from None
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptWeights(f"{path} is not a manifest of schema {SCHEMA_VERSION}: {where}: {first['msg']}") from error

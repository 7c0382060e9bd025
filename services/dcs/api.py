"""Contract of the checkpoint service."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PublishTicket:
    """Where the actor stages a version: the store's root folder in memory-backed storage."""

    root: str
    bucket_bytes: int


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """The newest committed version. `folder` stays readable while the version is pinned or recent.

    `probe`: {"tokens": [[int]], "logprobs": [[float]]}: a fixed probe and the trainer's log-probs of it
    under exactly these weights, at temperature 1.
    """

    version: int
    step: int
    folder: str
    digest: str
    probe: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A complete checkpoint."""

    step: int
    version: int
    folder: str
    meta: dict[str, Any] = field(default_factory=dict)

"""Contract of the checkpoint service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from relax.control.lineage import Published
from relax.types import RelaxError
from relax.weights.cache import SUFFIX as CACHE_SUFFIX
from relax.weights.tcp import WeightSource, is_loopback


class Unreachable(RelaxError):
    """An instance cannot get at the weights or the bus as the run is configured; says which key to set."""


@dataclass(frozen=True, slots=True)
class PublishTicket:
    """Where the actor stages a version: the store's root folder in memory-backed storage, on this Ray node.

    `snapshots`: folder beside it for the actor's own state (`relax.checkpoint.snapshot`). `newest`: the highest
    version that was ever published in this run folder, and its step; its weights may be gone. `reserve_bytes`: what
    must stay free there.
    """

    root: str
    snapshots: str
    bucket_bytes: int
    node_id: str
    newest: Published | None
    reserve_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where published versions lie, and who else serves them.

    `root` is in the memory of Ray's node `node_id`; `source` its TCP server, None without one. `keep` and
    `reserve_bytes` go for copies on other nodes too.
    """

    node_id: str
    root: str
    keep: int
    reserve_bytes: int
    transport: Literal["auto", "shared_memory", "tcp"]
    source: WeightSource | None

    def source_for(self, node_id: str) -> WeightSource | None:
        """Where an instance on this node pulls from; None: it reads the store's own folder. Raises `Unreachable`."""
        if node_id == self.node_id:
            return self.source if self.transport == "tcp" else None
        if self.source is None:
            raise Unreachable(
                f"this instance is on node {node_id[:8]} and the weights are in the memory of node {self.node_id[:8]}: "
                "set dcs.transport to auto or tcp, or place both on one node"
            )
        if is_loopback(self.source.host):
            raise Unreachable(
                f"this instance is on node {node_id[:8]} and the weights of node {self.node_id[:8]} are served on "
                f"{self.source.host}, which only that node reaches: set dcs.host to an interface of it"
            )
        return self.source

    def cache_root(self, node_id: str) -> Path:
        """Folder of the copies on another node."""
        store = Path(self.root)
        return store.with_name(f"{store.name}-{node_id[:12]}{CACHE_SUFFIX}")


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """The newest committed version. `folder` stays readable, on its node, while the version is pinned or recent.

    `probe`: {"tokens": [[int]], "logprobs": [[float]]}: a fixed probe and the trainer's log-probs of it
    under exactly these weights, at temperature 1.
    """

    version: int
    step: int
    folder: str
    digest: str
    place: StorePlace
    probe: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedState:
    """A whole state of the actor after `step`, in memory or on disk, as `relax.training.state` reads it."""

    step: int
    folder: str
    meta: dict[str, Any] = field(default_factory=dict)
    in_memory: bool = False

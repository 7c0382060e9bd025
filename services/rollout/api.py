"""Contract of the rollout manager and its instances."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """An instance's own word. `version` -1: no weights yet. `url`: its engine's HTTP protocol on loopback."""

    app: str
    version: int
    running_samples: int
    url: str
    replica_id: str
    draining: bool = False
    """It leases no more: an earlier manager was taking it away."""


@dataclass(frozen=True, slots=True)
class LedgerPosition:
    """Where the ledger stands: what a checkpoint records. `cursor` is the prompt source's."""

    seq: int
    trained: int
    filtered: int
    dropped: int
    cursor: dict[str, object]

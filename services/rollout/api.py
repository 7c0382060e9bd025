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
class ActorState:
    """From where an actor trains on: after which step, the highest version that was ever published, and the step of the
    newest one that engines can still take (its own step where there is none)."""

    step: int
    newest_version: int
    published_step: int


@dataclass(frozen=True, slots=True)
class LedgerPosition:
    """Where the ledger stands: what a checkpoint records. `cursor` is the prompt source's."""

    seq: int
    trained: int
    filtered: int
    dropped: int
    cursor: dict[str, object]

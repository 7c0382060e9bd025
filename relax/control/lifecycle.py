"""Life cycle of one rollout instance: which change of state is legal, and how long each may take.

    PENDING -> CREATING -> HEALTH_CHECKING -> WEIGHT_SYNCING -> READY -> ACTIVE -> DRAINING -> STOPPED
                              ^                   ^   |___________|________|
                              |___________________|_____ restarted _|        FAILED from any living state

An engine that was restarted holds no version: it goes back to HEALTH_CHECKING and gets work only after a
new sync. STOPPED and FAILED are final; a replacement is a new instance.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from relax.config.roles import RolloutConfig
from relax.types import RelaxError


class IllegalTransition(RelaxError):
    """A change of state that the life cycle does not have."""


class InstanceState(enum.StrEnum):
    PENDING = "pending"
    """Wanted; nothing exists yet."""
    CREATING = "creating"
    """Its application is being deployed."""
    HEALTH_CHECKING = "health_checking"
    """Deployed; the engine has not answered yet."""
    WEIGHT_SYNCING = "weight_syncing"
    """Adopts a version, takes no work."""
    READY = "ready"
    """Holds a verified version, has not leased yet."""
    ACTIVE = "active"
    """Leases and generates."""
    DRAINING = "draining"
    """Finishes or hands back what it leased, takes no more."""
    STOPPED = "stopped"
    FAILED = "failed"


_S = InstanceState
_NEXT: Mapping[InstanceState, frozenset[InstanceState]] = {
    _S.PENDING: frozenset({_S.CREATING, _S.STOPPED}),
    _S.CREATING: frozenset({_S.HEALTH_CHECKING, _S.DRAINING}),
    _S.HEALTH_CHECKING: frozenset({_S.WEIGHT_SYNCING, _S.DRAINING}),
    _S.WEIGHT_SYNCING: frozenset({_S.READY, _S.HEALTH_CHECKING, _S.DRAINING}),
    _S.READY: frozenset({_S.ACTIVE, _S.WEIGHT_SYNCING, _S.HEALTH_CHECKING, _S.DRAINING}),
    _S.ACTIVE: frozenset({_S.WEIGHT_SYNCING, _S.HEALTH_CHECKING, _S.DRAINING}),
    _S.DRAINING: frozenset({_S.STOPPED}),
    _S.STOPPED: frozenset(),
    _S.FAILED: frozenset(),
}
FINAL = frozenset({_S.STOPPED, _S.FAILED})
SERVING = frozenset({_S.READY, _S.ACTIVE})
"""States in which an instance may lease."""


def allowed(state: InstanceState) -> frozenset[InstanceState]:
    """Every state that may follow."""
    return _NEXT[state] if state in FINAL else _NEXT[state] | {_S.FAILED}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. `start_s` runs from the creation to the first time ACTIVE, over all states in between."""

    start_s: float
    sync_s: float
    drain_s: float

    @classmethod
    def from_config(cls, config: RolloutConfig, drain_s: float) -> Deadlines:
        return cls(start_s=config.start_deadline_s, sync_s=config.adoption_deadline_s, drain_s=drain_s)

    def of(self, state: InstanceState) -> float | None:
        """Longest stay in a state; None is for ever."""
        if state in (_S.PENDING, _S.CREATING, _S.HEALTH_CHECKING):
            return self.start_s
        return {_S.WEIGHT_SYNCING: self.sync_s, _S.DRAINING: self.drain_s}.get(state)


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance at one moment; `move` gives the next. Times are seconds on the caller's clock."""

    name: str
    created_at_s: float
    state: InstanceState = InstanceState.PENDING
    since_s: float = field(default=-1.0)
    reason: str = ""
    """Why it came into its state; the error of a FAILED one."""
    was_active: bool = False
    restarts: int = 0
    """Returns to HEALTH_CHECKING after its engine was lost."""

    def __post_init__(self) -> None:
        if self.since_s < 0:
            object.__setattr__(self, "since_s", self.created_at_s)

    def move(self, to: InstanceState, now_s: float, reason: str = "") -> Instance:
        """Raises `IllegalTransition`."""
        if to not in allowed(self.state):
            legal = ", ".join(sorted(allowed(self.state))) or "nothing"
            raise IllegalTransition(f"instance {self.name} is {self.state} and cannot become {to}; allowed: {legal}")
        restarted = to is _S.HEALTH_CHECKING and self.state is not _S.CREATING
        return replace(
            self,
            state=to,
            since_s=now_s,
            reason=reason,
            was_active=self.was_active or to is _S.ACTIVE,
            restarts=self.restarts + restarted,
        )

    @property
    def serving(self) -> bool:
        return self.state in SERVING

    def late(self, now_s: float, deadlines: Deadlines) -> str | None:
        """Why the instance has to be failed now, in a sentence; None while it is in time."""
        if self.state in FINAL:
            return None
        stay, limit = now_s - self.since_s, deadlines.of(self.state)
        if limit is not None and stay >= limit:
            return f"instance {self.name} is {self.state} since {stay:.0f} s, the limit is {limit:.0f} s"
        age = now_s - self.created_at_s
        if not self.was_active and self.state is not _S.DRAINING and age >= deadlines.start_s:
            limit_text = f"the limit is {deadlines.start_s:.0f} s"
            return f"instance {self.name} is not active {age:.0f} s after its creation, {limit_text}"
        return None

"""What the controller does, and what it saw go wrong, as records. Pure; times are Unix seconds.

PENDING -> RUNNING -> SUCCEEDED
   |          +-----> FAILED (with its error)
   +----------+-----> CANCELLED
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from relax.types import Json, RelaxError


class IllegalOperationChange(RelaxError):
    """A change that an operation cannot make."""


class OperationState(enum.StrEnum):
    PENDING = "pending"
    """Recorded; nothing is done yet: it may wait for a back-off."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Not needed any more, or overtaken by another."""


_S = OperationState
_NEXT: Mapping[OperationState, frozenset[OperationState]] = {
    _S.PENDING: frozenset({_S.RUNNING, _S.CANCELLED, _S.FAILED}),
    _S.RUNNING: frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCELLED}),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that an operation did. `end_s` None: it is under way."""

    name: str
    begin_s: float
    end_s: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """At one moment; each change gives the next. `target`: a role, an instance, or the whole run.

    `cause`: why, in a sentence. `incident`: id of the incident that it answers.
    """

    id: str
    kind: str
    target: str
    cause: str
    created_s: float
    state: OperationState = OperationState.PENDING
    started_s: float | None = None
    ended_s: float | None = None
    not_before_s: float = 0.0
    steps: tuple[Step, ...] = ()
    error: str = ""
    incident: str | None = None
    request: Mapping[str, Json] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return not _NEXT[self.state]

    def start(self, now_s: float) -> Operation:
        return replace(self._move(_S.RUNNING), started_s=now_s)

    def step(self, name: str, now_s: float, detail: str = "") -> Operation:
        """Ends the step before it. Raises `IllegalOperationChange` unless it is running."""
        if self.state is not _S.RUNNING:
            raise IllegalOperationChange(f"operation {self.id} is {self.state} and takes no step '{name}'")
        return replace(self, steps=(*self._closed_steps(now_s), Step(name, now_s, None, detail)))

    def succeed(self, now_s: float) -> Operation:
        return self._end(_S.SUCCEEDED, now_s)

    def fail(self, now_s: float, error: str) -> Operation:
        """Raises `ValueError` for a failure without a reason."""
        if not error:
            raise ValueError("a failed operation needs an error")
        return replace(self._end(_S.FAILED, now_s), error=error)

    def cancel(self, now_s: float, reason: str) -> Operation:
        return replace(self._end(_S.CANCELLED, now_s), error=reason)

    def _move(self, to: OperationState) -> Operation:
        if to not in _NEXT[self.state]:
            raise IllegalOperationChange(f"operation {self.id} is {self.state} and cannot become {to}")
        return replace(self, state=to)

    def _end(self, to: OperationState, now_s: float) -> Operation:
        return replace(self._move(to), ended_s=now_s, steps=self._closed_steps(now_s))

    def _closed_steps(self, now_s: float) -> tuple[Step, ...]:
        return tuple(step if step.end_s is not None else replace(step, end_s=now_s) for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Operation:
        steps = tuple(Step(**step) for step in body["steps"])
        return cls(**{**body, "state": OperationState(body["state"]), "steps": steps})


@dataclass(frozen=True, slots=True)
class Incident:
    """Something went wrong. `fault`: of `relax.control.recovery.Fault`. `last_progress_s`: before the incident, in
    seconds. `traceback`: the replica's own, where it has told one. `ended_s` None: it is still so."""

    id: str
    fault: str
    role: str
    instance: str
    at_s: float
    detail: str
    node: str = ""
    pid: int = 0
    last_progress_s: float | None = None
    traceback: str | None = None
    decision: str = ""
    """What was decided, and why."""
    operation: str | None = None
    ended_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Incident:
        return cls(**body)

"""States of a run and the changes between them.

STARTING -> RUNNING -> FINISHING -> FINISHED
   |           |           |
   +-----------+-----------+--> FAILED (with its reason) or STOPPED (on request)
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from relax.types import RelaxError


class IllegalRunTransition(RelaxError):
    """A change of state that a run cannot make."""


class RunState(enum.StrEnum):
    STARTING = "starting"
    """Roles are coming up."""
    RUNNING = "running"
    FINISHING = "finishing"
    """All steps are trained: last evaluation, checkpoint, report."""
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


_S = RunState
_ENDED_EARLY = frozenset({_S.FAILED, _S.STOPPED})
_NEXT: Mapping[RunState, frozenset[RunState]] = {
    _S.STARTING: _ENDED_EARLY | {_S.RUNNING},
    _S.RUNNING: _ENDED_EARLY | {_S.FINISHING},
    _S.FINISHING: _ENDED_EARLY | {_S.FINISHED},
    _S.FINISHED: frozenset(),
    _S.FAILED: frozenset(),
    _S.STOPPED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class RunStatus:
    """`reason` is set exactly for a failed run."""

    state: RunState = RunState.STARTING
    reason: str = ""

    @property
    def ended(self) -> bool:
        return not _NEXT[self.state]

    def move(self, to: RunState, reason: str = "") -> RunStatus:
        """The next status. A failure after the end of a run changes nothing: the first end is the truth.

        Raises `IllegalRunTransition`, and `ValueError` for a failure without a reason or a reason without one.
        """
        if (to is RunState.FAILED) != bool(reason):
            raise ValueError("a failed run needs a reason, and no other state has one")
        if self.ended and to in _ENDED_EARLY:
            return self
        if to not in _NEXT[self.state]:
            raise IllegalRunTransition(f"a run that is {self.state} cannot become {to}")
        return RunStatus(to, reason)

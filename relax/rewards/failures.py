"""What failed scorings do to a sample and to the run. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from relax.rewards.base import RewardResult
from relax.types import RewardState

WINDOW_CALLS = 100
"""Calls that the share of failures looks back on."""
MIN_CALLS = 20
"""A share of fewer calls says nothing: the first call failing is no reason to stop."""


@dataclass(slots=True)
class FailureWindow:
    """The share of failures among the last calls (B20)."""

    window: int = WINDOW_CALLS
    min_calls: int = MIN_CALLS
    _failed: deque[bool] = field(default_factory=deque)

    def record(self, state: RewardState) -> None:
        self._failed.append(state is not RewardState.OK)
        if len(self._failed) > self.window:
            self._failed.popleft()

    @property
    def calls(self) -> int:
        return len(self._failed)

    @property
    def share(self) -> float:
        """In [0, 1]; 0 before the first call."""
        return sum(self._failed) / len(self._failed) if self._failed else 0.0

    def should_stop(self, max_share: float) -> bool:
        """Whether more than `max_share` of the window failed, once it holds `min_calls` calls."""
        return self.calls >= self.min_calls and self.share > max_share


@dataclass(frozen=True, slots=True)
class Settled:
    """What a sample gets after its scoring: two numbers, or its exclusion as a tombstone with a reason."""

    reward: float
    accuracy: float
    excluded: str | None = None


def settle(result: RewardResult, on_failure: Literal["exclude", "floor"], failure_reward: float) -> Settled:
    """Apply the failure policy: `floor` gives `failure_reward` and accuracy 0; `exclude` the tombstone reason."""
    if result.reward is not None and result.accuracy is not None:
        return Settled(result.reward, result.accuracy)
    if on_failure == "floor":
        return Settled(failure_reward, 0.0)
    return Settled(0.0, 0.0, excluded=f"reward_{result.state.value}")

"""What a replica does with its time and how fast it is, over its last seconds. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_SPAN_S = 2.0
"""Two heartbeats that were held up and come together say nothing."""
WINDOW_S = 15.0
"""Long enough for a few heartbeats, short enough to see a change."""


@dataclass(slots=True)
class Pace:
    """Observations of one replica; the time is its own, which its time split adds up to."""

    _seen: deque[tuple[float, Mapping[str, float], float]] = field(default_factory=deque)

    def observe(self, split: Mapping[str, float], tokens: float) -> None:
        """`split`: seconds by kind since the replica's start; `tokens`: generated since then."""
        at = sum(split.values())
        self._seen.append((at, split, tokens))
        while len(self._seen) > 2 and at - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()

    def shares(self) -> dict[str, float]:
        """Kind -> part of the window; empty before there are two observations."""
        if self._span_s < MIN_SPAN_S:
            return {}
        (_, first, _), (_, last, _) = self._seen[0], self._seen[-1]
        return {kind: (last[kind] - first.get(kind, 0.0)) / self._span_s for kind in last}

    def tokens_per_s(self) -> float:
        """0 before there are two observations."""
        return (self._seen[-1][2] - self._seen[0][2]) / self._span_s if self._span_s >= MIN_SPAN_S else 0.0

    @property
    def _span_s(self) -> float:
        return self._seen[-1][0] - self._seen[0][0] if self._seen else 0.0

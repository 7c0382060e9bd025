"""A clock that jumps to the next event."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Events at one time run in the order in which they were made, so a simulation is a function of its inputs."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._cancelled: set[int] = set()

    def after(self, seconds: float, action: Callable[[], None]) -> int:
        """Returns a number for `cancel`."""
        number = next(self._order)
        heapq.heappush(self._events, (self.now + seconds, number, action))
        return number

    def cancel(self, number: int | None) -> None:
        if number is not None:
            self._cancelled.add(number)

    def next_at(self) -> float | None:
        """When the next event is due."""
        while self._events and self._events[0][1] in self._cancelled:
            self._cancelled.discard(heapq.heappop(self._events)[1])
        return self._events[0][0] if self._events else None

    def advance(self, to: float) -> None:
        """Run what is due until `to`, each event at its own time; for a clock that follows another one."""
        while (when := self.next_at()) is not None and when <= to:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = max(self.now, to)

    def run(self, until: Callable[[], bool]) -> None:
        """Until `until()` or no event is left."""
        while self._events and not until():
            when, number, action = heapq.heappop(self._events)
            if number in self._cancelled:
                self._cancelled.discard(number)
                continue
            self.now = when
            action()

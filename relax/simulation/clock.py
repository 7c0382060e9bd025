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

    def run(self, until: Callable[[], bool]) -> None:
        """Until `until()` or no event is left."""
        while self._events and not until():
            when, number, action = heapq.heappop(self._events)
            if number in self._cancelled:
                self._cancelled.discard(number)
                continue
            self.now = when
            action()

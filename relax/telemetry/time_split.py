"""Where a process's time goes: work, wait for data, wait for weights, idle. The four add up to its lifetime."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

WORK, WAIT_WEIGHTS, WAIT_DATA, IDLE = "work_s", "wait_weights_s", "wait_data_s", "idle_s"
KINDS = (WORK, WAIT_WEIGHTS, WAIT_DATA)
"""In the order of preference: a process that computes while another of its tasks waits is working."""


@dataclass(slots=True, eq=False)
class Booking:
    """What one stretch of code spends its time on. `kind` may be corrected until the stretch ends, when only the
    outcome tells what was waited for. `seconds`: attributed to it so far."""

    kind: str
    seconds: float = 0.0


class TimeSplit:
    """Each moment belongs to one kind: that of the open bookings, work before waiting, or idle without any.

    A booking inside another of the same task (or thread) takes its time over while it is open. Bookings of tasks and
    threads side by side never count a moment twice. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock()
        self._seconds = dict.fromkeys((*KINDS, IDLE), 0.0)
        self._open: list[Booking] = []
        self._live: list[Booking] = []
        """Open ones, and those that an inner one has taken over from."""
        self._current: ContextVar[tuple[Booking, object] | None] = ContextVar("booking", default=None)

    @contextlib.contextmanager
    def book(self, kind: str) -> Iterator[Booking]:
        """Book the time of the body as `kind`. The body of a generator must not yield inside."""
        if kind not in KINDS:
            raise ValueError(f"unknown kind of time '{kind}': {', '.join(KINDS)}")
        booking, owner = Booking(kind), _owner()
        outer = self._current.get()
        above = outer[0] if outer is not None and outer[1] == owner else None
        token = self._current.set((booking, owner))
        with self._lock:
            self._exchange(above, booking)
            self._live.append(booking)
        try:
            yield booking
        finally:
            self._current.reset(token)
            with self._lock:
                self._exchange(booking, above)
                self._live.remove(booking)
                self._seconds[booking.kind] += booking.seconds

    def snapshot(self) -> dict[str, float]:
        """Seconds by kind since the start; their sum is the lifetime."""
        with self._lock:
            self._attribute()
            split = dict(self._seconds)
            for booking in self._live:
                split[booking.kind] += booking.seconds
        return split

    def _exchange(self, closed: Booking | None, opened: Booking | None) -> None:
        self._attribute()
        if closed is not None:
            self._open.remove(closed)
        if opened is not None:
            self._open.append(opened)

    def _attribute(self) -> None:
        """The time since the last change goes to the open booking that is preferred."""
        now = self._clock()
        elapsed, self._since = now - self._since, now
        if self._open:
            min(self._open, key=lambda booking: KINDS.index(booking.kind)).seconds += elapsed
        else:
            self._seconds[IDLE] += elapsed


def _owner() -> object:
    """The task that runs, or the thread where none does."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:  # no event loop in this thread
        return threading.get_ident()

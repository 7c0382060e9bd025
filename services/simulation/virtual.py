"""Asyncio on the simulated clock: code that awaits, sleeps and times out runs unchanged, and waits take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar, TypeVarTuple, Unpack

from relax.simulation.clock import Clock
from relax.types import RelaxError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Deadlock(RelaxError):
    """Everybody waits, and no event is left that could wake one of them."""


class _ClockSelector(selectors.SelectSelector):
    """Where the loop would wait for I/O until its next timer, the clock jumps."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        event = self._clock.next_at()
        if timeout is None and event is None:
            raise Deadlock(f"nobody has anything to do at {self._clock.now:.3f} s")
        timer = None if timeout is None else self._clock.now + max(timeout, 0.0)
        self._clock.advance(min(at for at in (event, timer) if at is not None))
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """One thread, no I/O: the order of everything is a function of the code and its seeds.

    What others would give to a thread (`asyncio.to_thread`) is done on the spot.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(_ClockSelector(clock))
        self.clock = clock
        self.set_task_factory(_adopted)

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # passed on to who awaits it, as a thread would
            done.set_exception(error)
        return done


class Process:
    """One incarnation of a role: its tasks, and theirs, until it dies."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused_until = 0.0
        """SIGSTOP until then: nothing leaves it and nothing reaches it."""
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in their order: a run follows from its seed

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]

    def die(self) -> None:
        """SIGKILL. The tasks end where they are; `alive` keeps what they still try from getting out."""
        self.alive = False
        current = asyncio.current_task()
        for task in list(self._tasks):
            if task is not current:
                task.cancel()


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process that the running task belongs to."""


def _adopted(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    context = options.get("context")
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.adopt(task)
    return task

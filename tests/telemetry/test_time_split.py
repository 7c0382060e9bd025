from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.telemetry.time_split import KINDS, TimeSplit


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def spent(split: TimeSplit) -> dict[str, float]:
    return {kind: seconds for kind, seconds in split.snapshot().items() if seconds}


def test_what_is_not_booked_is_idle(clock: HandClock) -> None:
    split = TimeSplit(clock)
    clock.now += 2
    with split.book("work_s"):
        clock.now += 3
    clock.now += 1
    assert spent(split) == {"work_s": 3, "idle_s": 3}


def test_an_open_booking_counts_before_it_ends(clock: HandClock) -> None:
    split = TimeSplit(clock)
    with split.book("wait_data_s"):
        clock.now += 3
        assert spent(split) == {"wait_data_s": 3}
        clock.now += 4
    assert spent(split) == {"wait_data_s": 7}


def test_a_wait_inside_work_is_no_work(clock: HandClock) -> None:
    split = TimeSplit(clock)
    with split.book("work_s"):
        clock.now += 1
        with split.book("wait_data_s"):
            clock.now += 10
            assert spent(split) == {"work_s": 1, "wait_data_s": 10}
        clock.now += 2
    assert spent(split) == {"work_s": 3, "wait_data_s": 10}


async def test_tasks_side_by_side_never_count_a_moment_twice(clock: HandClock) -> None:
    """Two tasks work while a third waits: the process works. A child task is not inside its parent's booking."""
    split, go, ready = TimeSplit(clock), asyncio.Event(), []

    async def task(kind: str) -> None:
        with split.book(kind):
            ready.append(kind)
            await go.wait()

    with split.book("work_s"):
        tasks = [asyncio.create_task(task(kind)) for kind in ("work_s", "wait_data_s")]
        await asyncio.sleep(0)  # one turn of the loop: both have begun
        assert len(ready) == 2
        clock.now += 5
    clock.now += 1
    go.set()
    await asyncio.gather(*tasks)
    clock.now += 2
    assert spent(split) == {"work_s": 6, "idle_s": 2}


def test_a_thread_that_works_beside_a_wait_counts_as_work(clock: HandClock) -> None:
    split, opened, go = TimeSplit(clock), threading.Event(), threading.Event()

    def work() -> None:
        with split.book("work_s"):
            opened.set()
            assert go.wait(10)

    thread = threading.Thread(target=work)
    with split.book("wait_data_s"):
        clock.now += 1
        thread.start()
        assert opened.wait(10)
        clock.now += 2
        go.set()
        thread.join(10)
        clock.now += 4
    assert spent(split) == {"work_s": 2, "wait_data_s": 5}


def test_what_was_waited_for_may_turn_out_at_the_end(clock: HandClock) -> None:
    split = TimeSplit(clock)
    with split.book("wait_data_s") as booking:
        clock.now += 3
        booking.kind = "wait_weights_s"
    assert spent(split) == {"wait_weights_s": 3}


def test_an_unknown_kind_names_the_known_ones(clock: HandClock) -> None:
    with pytest.raises(ValueError, match="work_s, wait_weights_s, wait_data_s"), TimeSplit(clock).book("sleep_s"):
        pass


@given(st.lists(st.tuples(st.sampled_from([*KINDS, "end"]), st.floats(0, 100)), max_size=30))
def test_the_kinds_always_add_up_to_the_lifetime(actions: list[tuple[str, float]]) -> None:
    clock = HandClock()
    split = TimeSplit(clock)
    begin, stack = clock.now, list[Any]()
    for kind, seconds in actions:
        if kind != "end":
            stack.append(split.book(kind))
            stack[-1].__enter__()
        elif stack:
            stack.pop().__exit__(None, None, None)
        clock.now += seconds
        assert sum(split.snapshot().values()) == pytest.approx(clock.now - begin)
    while stack:
        stack.pop().__exit__(None, None, None)

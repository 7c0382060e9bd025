"""A step that was taken counts in the bus, whatever became of its leases; one that was not is discarded whole."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bus.errors import BusTimeout, LeaseLost
from bus.records import AckResult, Caller, TrainedStep
from services.actor.committing import commit_step, hold_on
from services.bus_link import BusLink


class Bus:
    """Stands in for the client: `answers` of the calls, one after the other; errors are raised."""

    caller = Caller("actor-0", 1, "epoch")

    def __init__(self, **answers: list[Any]) -> None:
        self.answers, self.calls = answers, list[str]()

    def on_stored(self, call: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append(" ".join([name, *(str(argument) for argument in arguments[:2])]))
            answer = self.answers[name].pop(0) if self.answers.get(name) else None
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def reporter() -> Any:
    counted: dict[str, float] = {}
    return SimpleNamespace(
        counters=counted,
        count=lambda name, amount=1.0: counted.update({name: counted.get(name, 0) + amount}),
        stopped=asyncio.Event(),
    )


async def test_a_commit_without_an_answer_is_repeated() -> None:
    """behaviour: B12"""
    bus, who = Bus(commit_step=[BusTimeout("lost"), AckResult(4)]), reporter()
    link = BusLink(bus, who)  # type: ignore[arg-type]
    trained = TrainedStep(3, 3, {"g": 4})
    assert await commit_step(bus, link, who, trained, ["a", "b"]) == AckResult(4)  # type: ignore[arg-type]
    assert len(bus.calls) == 2 and who.counters == {"commits_repeated": 1}


async def test_a_step_that_does_not_hold_all_its_leases_any_more_is_discarded_before_it_is_taken() -> None:
    """behaviour: B12"""
    bus, who = Bus(extend=[10.0, BusTimeout("lost"), LeaseLost("expired")]), reporter()
    with pytest.raises(LeaseLost):
        await hold_on(bus, who, ["a", "b"])  # type: ignore[arg-type]
    assert [call for call in bus.calls if call.startswith("release")] == [
        "release a step_discarded",
        "release b step_discarded",
    ]
    assert who.counters == {"bus_timeouts": 1, "leases_lost": 1}


async def test_a_refill_without_an_answer_is_tried_again() -> None:
    """behaviour: B12"""
    who, bus, refills = reporter(), Bus(), list[int]()
    who.instance = "rollout"

    async def refill() -> None:
        refills.append(1)
        if len(refills) == 1:
            raise BusTimeout("lost")

    link = BusLink(bus, who, refill)  # type: ignore[arg-type]
    await link.rejoin(Bus.caller)
    assert len(refills) == 2 and who.counters == {"bus_losses": 1, "bus_timeouts": 1}

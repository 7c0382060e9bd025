"""Puts that share a call, evaluation in the order of its prompts, seeds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bus.errors import LeaseLost
from bus.records import Event, EventKind, MemberReport, RowPut
from relax.types import PolicyVersion, Prompt, Purpose
from services.rollout.evaluation import EvalIncomplete, Evaluation
from services.rollout.instance import sample_seed
from services.rollout.put_batcher import PutBatcher


class RecordingBus:
    """Stands in for the bus client; holds each put until it is let go."""

    def __init__(self) -> None:
        self.puts: list[tuple[str, list[str]]] = []
        self.gate = asyncio.Event()
        self.fail: Exception | None = None
        self.admitted: list[Any] = []
        self.collected: list[str] = []

    async def put(self, rows: list[RowPut], *, lease_id: str, deadline_s: float, ack: bool) -> None:
        assert ack
        self.puts.append((lease_id, [row.row_id for row in rows]))
        await self.gate.wait()
        if self.fail:
            raise self.fail

    async def admit(self, groups: list[Any], deadline_s: float) -> None:
        self.admitted += groups

    async def collect_eval(self, group_ids: list[str]) -> None:
        self.collected += group_ids


def put(k: int) -> RowPut:
    return RowPut(f"g/{k}/0", "g", {})


async def test_samples_that_finish_during_a_put_share_the_next_one() -> None:
    bus = RecordingBus()
    batcher = PutBatcher(bus)  # type: ignore[arg-type]
    first = [asyncio.create_task(batcher.put([put(k)], "lease")) for k in range(3)]
    async with asyncio.timeout(10):
        while not bus.puts:
            await asyncio.sleep(0)
    later = [asyncio.create_task(batcher.put([put(k)], "lease")) for k in range(3, 7)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(bus.puts) == 1, "one put at a time"
    bus.gate.set()
    await asyncio.gather(*first, *later)
    assert [len(rows) for _, rows in bus.puts] == [3, 4]


async def test_leases_do_not_share_a_put() -> None:
    bus = RecordingBus()
    bus.gate.set()
    batcher = PutBatcher(bus)  # type: ignore[arg-type]
    await asyncio.gather(batcher.put([put(0)], "a"), batcher.put([put(1)], "b"))
    assert sorted(bus.puts) == [("a", ["g/0/0"]), ("b", ["g/1/0"])]


@pytest.mark.parametrize("error", [LeaseLost("gone"), TypeError("a fault of ours")])
async def test_a_failed_put_fails_each_of_its_samples_and_the_next_goes_on(error: Exception) -> None:
    bus = RecordingBus()
    bus.gate.set()
    bus.fail = error
    batcher = PutBatcher(bus)  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        results = await asyncio.gather(*(batcher.put([put(k)], "lease") for k in range(2)), return_exceptions=True)
    assert results == [error, error]
    bus.fail = None
    await batcher.put([put(9)], "lease")


def prompts(count: int) -> list[Prompt]:
    return [Prompt("eval-toy", 0, index, text="1>") for index in range(count)]


def complete(group_id: str, accuracy: float) -> Event:
    tags = {"accuracy": accuracy, "part_math": accuracy, "part_format": 1.0}
    return Event(1, EventKind.COMPLETE, group_id, Purpose.EVAL, (MemberReport(0, None, tags),))


async def test_an_evaluation_keeps_the_order_of_its_prompts_and_means_of_parts() -> None:
    bus = RecordingBus()
    evaluation = Evaluation("before", prompts(3), epoch=1, first_seq=100)
    running = asyncio.create_task(evaluation.run(bus, PolicyVersion(4), 5.0))  # type: ignore[arg-type]
    while len(bus.admitted) < 3:
        await asyncio.sleep(0)
    assert all(group.min_version == 4 and group.purpose is Purpose.EVAL for group in bus.admitted)
    for index, accuracy in ((2, 0.0), (0, 1.0), (1, 0.0)):
        evaluation.on_event(complete(f"eval-toy:1:{index}", accuracy))
    report = await running
    assert report.accuracy == (1.0, 0.0, 0.0)
    assert report.parts == {"format": 1.0, "math": pytest.approx(1 / 3)}
    assert bus.collected == [f"eval-toy:1:{index}" for index in range(3)]


async def test_an_evaluation_past_its_deadline_says_how_many_answers_came() -> None:
    evaluation = Evaluation("after", prompts(2), epoch=0, first_seq=0)
    evaluation.on_event(complete("eval-toy:0:0", 1.0))
    with pytest.raises(EvalIncomplete, match="1 of 2 prompts answered"):
        await evaluation.run(RecordingBus(), PolicyVersion(0), 0.01)  # type: ignore[arg-type]


def test_a_sample_has_its_own_seed_whoever_draws_it() -> None:
    seeds = [sample_seed(1, f"toy:0:{g}/{k}") for g in range(20) for k in range(16)]
    assert len(set(seeds)) == len(seeds) and seeds[0] == sample_seed(1, "toy:0:0/0") != sample_seed(2, "toy:0:0/0")
    assert all(0 <= seed < 1 << 62 for seed in seeds)

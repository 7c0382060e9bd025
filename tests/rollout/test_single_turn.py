from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from relax.engines.base import EngineClient, EngineError, Generation
from relax.rollout.base import WorkerContext
from relax.rollout.single_turn import SingleTurnWorker
from relax.rollout.supervise import Failure, run_with_retries
from relax.types import DataError, DataItem, FinishReason, PolicyVersion, Prompt, SamplingParams


class FakeEngine:
    """Answers with what it was given, and remembers what it was asked."""

    def __init__(self, answer: Generation | Exception | None) -> None:
        self.answer = answer
        self.asked: list[tuple[Any, SamplingParams, str, float]] = []
        self.aborted: list[str | None] = []
        self.entered = asyncio.Event()

    async def generate(
        self, input_ids: Any, sampling: SamplingParams, *, request_id: str, deadline_s: float
    ) -> Generation:
        self.asked.append((input_ids, sampling, request_id, deadline_s))
        self.entered.set()
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return cast(Generation, self.answer)

    async def abort(self, request_id: str | None, *, deadline_s: float) -> None:
        self.aborted.append(request_id)
        raise EngineError("already gone")


def generation(ids: list[int], **changes: Any) -> Generation:
    given: dict[str, Any] = {
        "output_ids": np.array(ids, np.int32),
        "logprobs": np.array([-0.5 - i for i in range(len(ids))], np.float32),
        "versions": np.array([3 + i // 2 for i in range(len(ids))], np.int32),
        "finish_reason": FinishReason.STOP,
        "text": "",
    }
    return Generation(**{**given, **changes})


def worker(engine: FakeEngine, max_tokens: int = 16) -> SingleTurnWorker:
    return SingleTurnWorker(WorkerContext(cast(EngineClient, engine), cast(Any, None), max_tokens, 7.5))


ITEM = DataItem(Prompt("s", 0, 4, text="31>"), 2, 8, (6, 4, 13), SamplingParams(temperature=0.7, seed=9))


async def test_prompt_and_answer_become_aligned_arrays() -> None:
    """behaviour: B23"""
    trajectory = await worker(FakeEngine(generation([4, 6, 2]))).step(ITEM)
    assert trajectory.tokens.tolist() == [6, 4, 13, 4, 6, 2]
    assert trajectory.loss_mask.tolist() == [False, False, False, True, True, True]
    assert trajectory.rollout_logprobs.tolist() == [0, 0, 0, -0.5, -1.5, -2.5]
    assert trajectory.versions.tolist() == [-1, -1, -1, 3, 3, 4]
    arrays = (trajectory.tokens, trajectory.loss_mask, trajectory.rollout_logprobs, trajectory.versions)
    assert [a.dtype for a in arrays] == [np.int32, np.bool_, np.float32, np.int32]
    assert trajectory.sampling is ITEM.sampling
    assert trajectory.finish_reason is FinishReason.STOP


async def test_the_engine_is_asked_with_the_items_tokens_sampling_and_deadline() -> None:
    engine = FakeEngine(generation([2]))
    both = worker(engine)
    await both.step(ITEM)
    await both.step(ITEM)
    ids, sampling, request_id, deadline_s = engine.asked[0]
    assert (ids.tolist(), ids.dtype, deadline_s) == ([6, 4, 13], np.int32, 7.5)
    assert sampling == replace(ITEM.sampling, max_new_tokens=13), "no more than there is room for"
    assert request_id.startswith("s:0:4/2#")
    assert request_id != engine.asked[1][2], "a second attempt is another request"
    assert engine.aborted == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, "unequal lengths"),
        ({"versions": np.zeros(4, np.int32)}, "unequal lengths"),
        ({"versions": np.array([3, 4, 3], np.int32)}, "versions decrease"),
        ({"versions": np.array([3, -1, 3], np.int32)}, "no policy version"),
        ({"logprobs": np.array([0, np.nan, 0], np.float32)}, "non-finite"),
    ],
)
async def test_an_engines_disagreeing_arrays_are_refused(changes: dict[str, Any], message: str) -> None:
    """behaviour: B23"""
    outcome = await run_with_retries(worker(FakeEngine(generation([4, 6, 2], **changes))), ITEM, retries=0)
    assert isinstance(outcome, Failure) and "MalformedTrajectory" in outcome.reason and message in outcome.reason


async def test_an_abort_keeps_the_tokens_that_were_drawn() -> None:
    trajectory = await worker(FakeEngine(generation([4], finish_reason=FinishReason.ABORT))).step(ITEM)
    assert (trajectory.tokens.tolist(), trajectory.finish_reason) == ([6, 4, 13, 4], FinishReason.ABORT)


async def test_an_abort_before_the_first_token_is_an_error() -> None:
    with pytest.raises(EngineError, match="s:0:4/2 was aborted before its first token"):
        await worker(FakeEngine(generation([], finish_reason=FinishReason.ABORT))).step(ITEM)


async def test_a_prompt_without_room_for_an_answer_never_reaches_the_engine() -> None:
    engine = FakeEngine(generation([2]))
    with pytest.raises(DataError, match="3 tokens leave no room for more within 3 tokens"):
        await worker(engine, max_tokens=3).step(ITEM)
    assert engine.asked == []


async def test_a_cancelled_step_frees_its_slot_at_the_engine() -> None:
    engine = FakeEngine(None)
    task = asyncio.create_task(worker(engine).step(ITEM))
    await asyncio.wait_for(engine.entered.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted == [engine.asked[0][2]]


@pytest.mark.parametrize("error", [EngineError("out of memory"), TimeoutError("late")])
async def test_a_failed_request_is_aborted_and_its_own_error_reported(error: Exception) -> None:
    engine = FakeEngine(error)
    with pytest.raises(type(error), match=str(error)):
        await worker(engine).step(ITEM)
    assert engine.aborted == [engine.asked[0][2]]


async def test_version_numbers_stay_whole() -> None:
    big = np.array([2**31 - 1], np.int64)
    trajectory = await worker(FakeEngine(generation([2], versions=big))).step(ITEM)
    assert PolicyVersion(int(trajectory.versions[-1])) == 2**31 - 1

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from relax.rollout.supervise import Failure, run_with_retries
from relax.types import DataItem, FinishReason, Prompt, SamplingParams, Trajectory

ITEM = DataItem(Prompt("s", 0, 0, text="x"), 0, 1, (3,), SamplingParams())


def trajectory(length: int = 2, **changes: Any) -> Trajectory:
    given: dict[str, Any] = {
        "tokens": np.full(length, 3, np.int32),
        "loss_mask": np.ones(length, np.bool_),
        "rollout_logprobs": np.zeros(length, np.float32),
        "versions": np.zeros(length, np.int32),
        "sampling": SamplingParams(),
        "finish_reason": FinishReason.STOP,
    }
    return Trajectory(**{**given, **changes})


class Scripted:
    """Plays its outcomes one by one: an exception is raised, anything else returned."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.calls = 0

    async def step(self, item: DataItem) -> Trajectory:
        self.calls += 1
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome  # type: ignore[no-any-return]


async def test_a_good_sample_is_made_in_one_attempt() -> None:
    worker, made = Scripted(trajectory()), None
    made = await run_with_retries(worker, ITEM, 2)
    assert isinstance(made, list) and made[0].metadata == {} and worker.calls == 1


async def test_a_failed_attempt_is_retried_and_counted() -> None:
    """behaviour: B39"""
    worker = Scripted(ValueError("a"), KeyError("b"), trajectory())
    made = await run_with_retries(worker, ITEM, 2)
    assert isinstance(made, list) and made[0].metadata == {"failed_attempts": 2}


async def test_after_the_last_retry_the_sample_is_a_failure_with_the_last_error() -> None:
    """behaviour: B39"""
    worker = Scripted(ValueError("first"), RuntimeError("second"), trajectory())
    assert await run_with_retries(worker, ITEM, 1) == Failure("RuntimeError: second", 2)
    assert worker.calls == 2


async def test_no_retries_means_one_attempt() -> None:
    assert await run_with_retries(Scripted(ValueError("x")), ITEM, 0) == Failure("ValueError: x", 1)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "MalformedTrajectory: step returned NoneType, a Trajectory or a list of them is needed"),
        ({"tokens": [1]}, "MalformedTrajectory: step returned dict, a Trajectory or a list of them is needed"),
        (trajectory(loss_mask=np.zeros(2, np.bool_), versions=np.full(2, -1, np.int32)), "no sampled token"),
        (trajectory(rollout_logprobs=np.zeros(1, np.float32)), "unequal lengths"),
        (trajectory(9), "the trajectory has 9 tokens, the run allows 8"),
        ([], "a Trajectory or a list of them is needed"),
        ([trajectory()] * 3, "split into 3 segments, rollout.max_segments allows 2"),
        ([trajectory(), trajectory(9)], "the trajectory has 9 tokens"),
    ],
)
async def test_a_result_that_breaks_the_record_contract_is_a_failed_attempt(result: Any, reason: str) -> None:
    """behaviour: B23, B39"""
    made = await run_with_retries(Scripted(result, result), ITEM, 1, max_tokens=8, max_segments=2)
    assert isinstance(made, Failure) and made.attempts == 2
    assert reason in made.reason


async def test_cancellation_passes_through_without_a_retry() -> None:
    worker = Scripted(asyncio.CancelledError(), trajectory())
    with pytest.raises(asyncio.CancelledError):
        await run_with_retries(worker, ITEM, 2)
    assert worker.calls == 1

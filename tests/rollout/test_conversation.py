"""Several turns of one sample: ids only grow, or the trajectory is split and that is counted."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.engines.base import EngineClient, Generation
from relax.rollout.base import WorkerContext
from relax.rollout.conversation import RESPONSE, Conversation
from relax.types import DataError, DataItem, FinishReason, Prompt, SamplingParams

ITEM = DataItem(Prompt("s", 0, 4, text="31>"), 2, 8, (6, 4, 13), SamplingParams(max_new_tokens=8))


class Echo:
    """Answers each turn with the next scripted ids, all of the version that the turn has as its number."""

    def __init__(self, *answers: list[int]) -> None:
        self.answers = list(answers)
        self.sent: list[list[int]] = []
        self.limits: list[int] = []

    async def generate(
        self, input_ids: Any, sampling: SamplingParams, *, request_id: str, deadline_s: float
    ) -> Generation:
        self.sent.append(list(input_ids))
        self.limits.append(sampling.max_new_tokens)
        ids = self.answers.pop(0)
        turn = len(self.sent)
        return Generation(
            np.array(ids, np.int32),
            np.array([-turn - i / 10 for i in range(len(ids))], np.float32),
            np.full(len(ids), turn, np.int32),
            FinishReason.STOP,
            "",
        )


def conversation(engine: Echo, max_tokens: int = 64) -> Conversation:
    context = WorkerContext(cast(EngineClient, engine), cast(Any, None), max_tokens, 7.5)
    return Conversation(context, ITEM)


async def test_each_turn_sends_all_earlier_ids_and_the_new_ones() -> None:
    """behaviour: B22"""
    engine = Echo([5, 9], [7, 2])
    talk = conversation(engine)
    await talk.ask()
    talk.add([40, 41])
    await talk.ask()
    assert engine.sent == [[6, 4, 13], [6, 4, 13, 5, 9, 40, 41]]
    [trajectory] = talk.trajectories("final", calls=1)
    trajectory.validate()
    assert trajectory.tokens.tolist() == [6, 4, 13, 5, 9, 40, 41, 7, 2]
    assert trajectory.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
    assert trajectory.versions.tolist() == [-1] * 3 + [1, 1] + [-1] * 2 + [2, 2]
    assert trajectory.rollout_logprobs == pytest.approx([0, 0, 0, -1, -1.1, 0, 0, -2, -2.1])
    assert trajectory.metadata == {RESPONSE: "final", "calls": 1}
    assert talk.splits == 0


async def test_a_rendering_that_continues_is_appended_and_one_that_does_not_splits() -> None:
    """behaviour: B22. A template that drops the thinking of an earlier turn gives other ids for it."""
    engine = Echo([5, 9], [7, 2], [8])
    talk = conversation(engine)
    await talk.ask()
    talk.go_on_from([6, 4, 13, 5, 9, 40])
    await talk.ask()
    talk.go_on_from([6, 4, 13, 9, 40, 7, 2, 50])
    await talk.ask()
    assert talk.splits == 1
    first, second = talk.trajectories()
    assert first.tokens.tolist() == [6, 4, 13, 5, 9, 40, 7, 2] and int(first.loss_mask.sum()) == 4
    assert second.tokens.tolist() == [6, 4, 13, 9, 40, 7, 2, 50, 8]
    assert second.loss_mask.tolist() == [False] * 8 + [True], "what was sampled before is context there"
    for trajectory in (first, second):
        trajectory.validate()


async def test_a_split_before_anything_was_sampled_leaves_no_empty_segment() -> None:
    talk = conversation(Echo([5]))
    talk.go_on_from([9, 9])
    await talk.ask()
    [trajectory] = talk.trajectories()
    assert (trajectory.tokens.tolist(), talk.splits) == ([9, 9, 5], 0)


async def test_the_limits_hold_over_all_turns() -> None:
    engine = Echo([1, 2, 3], [4, 5], [])
    talk = conversation(engine, max_tokens=12)
    await talk.ask()
    talk.add([40])
    await talk.ask(max_new_tokens=2)
    assert engine.limits == [8, 2] and (talk.sampled, talk.room) == (5, 3)
    talk.add([40, 41, 42])
    with pytest.raises(DataError, match="leave no room"):
        await talk.ask()


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.lists(st.integers(0, 50), max_size=3)),
        min_size=1,
        max_size=4,
    )
)
async def test_the_mask_covers_exactly_the_sampled_ids(turns: list[tuple[list[int], list[int]]]) -> None:
    """behaviour: B22 B24"""
    engine = Echo(*(sampled for sampled, _ in turns))
    item = DataItem(ITEM.prompt, 0, 1, ITEM.prompt_tokens, SamplingParams(max_new_tokens=64))
    talk = Conversation(WorkerContext(cast(EngineClient, engine), cast(Any, None), 256, 1.0), item)
    sent = list(ITEM.prompt_tokens)
    for sampled, tool in turns:
        await talk.ask()
        assert engine.sent[-1] == sent
        talk.add(tool)
        sent += [*sampled, *tool]
    [trajectory] = talk.trajectories()
    trajectory.validate()
    assert trajectory.tokens.tolist() == sent
    assert trajectory.tokens[trajectory.loss_mask].tolist() == [i for sampled, _ in turns for i in sampled]

"""The built-in worker: one prompt, one answer."""

from __future__ import annotations

import contextlib
import itertools
import uuid

import numpy as np

from relax.engines.base import EngineError, Generation
from relax.rollout.base import WorkerContext
from relax.types import NO_VERSION, DataError, DataItem, FinishReason, Trajectory


class SingleTurnWorker:
    """Asks the engine once per item. A call that does not come back normally is aborted at the engine."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._name = uuid.uuid4().hex[:8]
        self._attempts = itertools.count()

    async def step(self, item: DataItem) -> Trajectory:
        """One sample: the rendered prompt and the engine's tokens behind it.

        Raises `DataError` for a prompt that leaves no room for an answer, `EngineError` for a request
        that was aborted before its first token, `TimeoutError` past the deadline.
        """
        room = self._context.max_tokens - len(item.prompt_tokens)
        if room < 1:
            raise DataError(
                f"prompt {item.prompt.group_id} has {len(item.prompt_tokens)} tokens and leaves no room "
                f"for an answer within {self._context.max_tokens}"
            )
        generation = await self._generate(item)
        if generation.finish_reason is FinishReason.ABORT and len(generation.output_ids) == 0:
            raise EngineError(f"request of {item.sample_id} was aborted before its first token")
        return join(item, generation)

    async def _generate(self, item: DataItem) -> Generation:
        context = self._context
        # Unique per attempt: the engine may still hold the request of a failed one.
        request_id = f"{item.sample_id}#{self._name}{next(self._attempts)}"
        returned = False
        try:
            generation = await context.engine.generate(
                np.asarray(item.prompt_tokens, dtype=np.int32),
                item.sampling,
                request_id=request_id,
                deadline_s=context.deadline_s,
            )
            returned = True
            return generation
        finally:
            if not returned:
                # The first failure is the one to report, not that of the clean-up.
                with contextlib.suppress(EngineError, TimeoutError):
                    await context.engine.abort(request_id, deadline_s=context.deadline_s)


def join(item: DataItem, generation: Generation) -> Trajectory:
    """Prompt and answer as aligned arrays [T]: the prompt part has mask false, log-prob 0, version -1."""
    prompt = np.asarray(item.prompt_tokens, dtype=np.int32)
    answer = np.asarray(generation.output_ids, dtype=np.int32)
    return Trajectory(
        tokens=np.concatenate([prompt, answer]),
        loss_mask=np.concatenate([np.zeros(len(prompt), np.bool_), np.ones(len(answer), np.bool_)]),
        rollout_logprobs=np.concatenate(
            [np.zeros(len(prompt), np.float32), np.asarray(generation.logprobs, np.float32)]
        ),
        versions=np.concatenate(
            [np.full(len(prompt), NO_VERSION, np.int32), np.asarray(generation.versions, np.int32)]
        ),
        sampling=item.sampling,
        finish_reason=generation.finish_reason,
    )

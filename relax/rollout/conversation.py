"""One sample over one or more turns: its ids only grow, and sampled ids are never encoded again (B22).

turn 1   prompt ─────────────▶ engine ─▶ sampled 1
turn 2   prompt sampled 1 tool ─▶ engine ─▶ sampled 2        what is sent = all earlier ids + the new ones
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from relax.engines.base import EngineError, Generation
from relax.rollout.base import WorkerContext
from relax.types import NO_VERSION, DataError, DataItem, FinishReason, IntArray, Json, Trajectory

RESPONSE = "response"
"""Key in a trajectory's metadata: the text that the reward scores in place of all sampled tokens."""

_process = uuid.uuid4().hex[:8]
_requests = itertools.count()


class Conversation:
    """Begins with the item's rendered prompt. Not for concurrent calls.

    `splits` counts how often the ids of a next turn did not continue those before (see `go_on_from`).
    """

    def __init__(self, context: WorkerContext, item: DataItem) -> None:
        self._context = context
        self._item = item
        self._parts: list[_Part] = []
        self._segments: list[list[_Part]] = []
        self._finish = FinishReason.STOP
        self.splits = 0
        self.add(item.prompt_tokens)

    @property
    def ids(self) -> IntArray:
        """int32 [T]: everything so far, of the current segment."""
        return np.concatenate([part.ids for part in self._parts])

    @property
    def room(self) -> int:
        """Tokens that still fit into the run's limit."""
        return self._context.max_tokens - sum(len(part.ids) for part in self._parts)

    @property
    def sampled(self) -> int:
        """Tokens sampled so far, of all segments."""
        return sum(len(part.ids) for segment in [*self._segments, self._parts] for part in segment if part.generation)

    def add(self, ids: Sequence[int] | IntArray) -> None:
        """Append ids that the policy did not sample: a tool's output, a user's message."""
        self._parts.append(_Part(np.asarray(ids, dtype=np.int32), None))

    def go_on_from(self, ids: Sequence[int] | IntArray) -> None:
        """The next turn's whole ids, as somebody else rendered them.

        If they begin with all ids so far, the rest is appended. If not (a template dropped or rewrote an earlier
        part), what was sampled stays as a segment of its own and a new segment begins with `ids`: counted.
        """
        whole, so_far = np.asarray(ids, dtype=np.int32), self.ids
        if len(whole) >= len(so_far) and np.array_equal(whole[: len(so_far)], so_far):
            if len(whole) > len(so_far):
                self.add(whole[len(so_far) :])
            return
        if any(part.generation for part in self._parts):
            self._segments.append(self._parts)
            self.splits += 1
        self._parts = [_Part(whole, None)]

    async def ask(self, *, max_new_tokens: int | None = None, stop: tuple[str, ...] | None = None) -> Generation:
        """Let the policy go on; its tokens are appended. A call that does not come back normally is aborted.

        At most `max_new_tokens`, what is left of the item's own limit, and the room. `stop`: other stop strings.
        Raises `DataError` when there is no room, `EngineError` for a request that was aborted before its first
        token, `TimeoutError` past the deadline.
        """
        sampling = self._item.sampling
        left = min(self.room, sampling.max_new_tokens - self.sampled)
        if left < 1:
            raise DataError(
                f"sample {self._item.sample_id}: {len(self.ids)} tokens leave no room for more within "
                f"{self._context.max_tokens} tokens and {sampling.max_new_tokens} sampled ones"
            )
        limit = left if max_new_tokens is None else min(left, max_new_tokens)
        if (limit, stop) != (sampling.max_new_tokens, None):
            sampling = replace(sampling, max_new_tokens=limit, stop=sampling.stop if stop is None else stop)
        # Unique per attempt: the engine may still hold the request of a failed one.
        request_id = f"{self._item.sample_id}#{_process}{next(_requests)}"
        generation = None
        try:
            generation = await self._context.engine.generate(
                self.ids, sampling, request_id=request_id, deadline_s=self._context.deadline_s
            )
        finally:
            if generation is None:
                # The first failure is the one to report, not that of the clean-up.
                with contextlib.suppress(EngineError, TimeoutError):
                    await self._context.engine.abort(request_id, deadline_s=self._context.deadline_s)
        if generation.finish_reason is FinishReason.ABORT and len(generation.output_ids) == 0:
            raise EngineError(f"request of {self._item.sample_id} was aborted before its first token")
        self._parts.append(_Part(np.asarray(generation.output_ids, dtype=np.int32), generation))
        self._finish = generation.finish_reason
        return generation

    def trajectories(self, response: str | None = None, **metadata: Json) -> list[Trajectory]:
        """The segments that hold sampled tokens, in order: one, unless it had to be split.

        `response`: what the reward scores; by default all sampled tokens. `metadata` goes to every segment.
        """
        if response is not None:
            metadata = {**metadata, RESPONSE: response}
        segments = [segment for segment in [*self._segments, self._parts] if any(part.generation for part in segment)]
        return [self._trajectory(segment, dict(metadata)) for segment in segments]

    def _trajectory(self, parts: list[_Part], metadata: dict[str, Json]) -> Trajectory:
        return Trajectory(
            tokens=np.concatenate([part.ids for part in parts]),
            loss_mask=np.concatenate([np.full(len(part.ids), part.generation is not None) for part in parts]),
            rollout_logprobs=np.concatenate([part.logprobs() for part in parts]),
            versions=np.concatenate([part.versions() for part in parts]),
            sampling=self._item.sampling,
            finish_reason=self._finish,
            metadata=metadata,
        )


class _Part:
    """Ids that were sampled in one turn, or given."""

    __slots__ = ("generation", "ids")

    def __init__(self, ids: IntArray, generation: Generation | None) -> None:
        self.ids, self.generation = ids, generation

    def logprobs(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        if self.generation is None:
            return np.zeros(len(self.ids), np.float32)
        return np.asarray(self.generation.logprobs, np.float32)

    def versions(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        if self.generation is None:
            return np.full(len(self.ids), NO_VERSION, np.int32)
        return np.asarray(self.generation.versions, np.int32)

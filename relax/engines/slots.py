"""The running sequences as arrays: which slot holds what, what a step adds, who is finished. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from relax.engines.requests import Output, Request
from relax.engines.sampling import SeedArray
from relax.types import FinishReason, FloatArray

_ROW = np.dtype(
    [
        ("length", np.int64),  # tokens known: prompt and generated
        ("prompt", np.int64),
        ("limit", np.int64),  # length at which generation stops
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("ignore_eos", np.bool_),
        ("watched", np.bool_),  # has stop ids or stop strings, or is streamed: looked at one by one
    ],
    align=True,
)
_HISTORY = (("tokens", np.int32), ("logprobs", np.float32), ("sampling_logprobs", np.float32), ("versions", np.int32))


@dataclass(frozen=True, slots=True)
class Moves:
    """After removals: slots `source` were copied over slots `target`; `span` positions of each are in use."""

    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    span: int


class SlotTable:
    """Running sequences in slots [0, n), without holes, so that a batch is a slice.

    `rows` is the structured array of settings and lengths; the histories are [slots, capacity], indexed
    by position in the sequence, and hold the prompt's ids too.
    """

    def __init__(self, slots: int, max_context: int, initial: int = 64) -> None:
        self.slots = slots
        self.n = 0
        self.requests: list[Request] = []
        self.rows = np.zeros(slots, dtype=_ROW)
        self._max_context = max_context
        self._history: dict[str, npt.NDArray[Any]] = {
            name: np.zeros((slots, min(initial, max_context)), kind) for name, kind in _HISTORY
        }

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        return self._history["tokens"]

    def _reserve(self, length: int) -> None:
        capacity = self.tokens.shape[1]
        if length <= capacity:
            return
        capacity = min(max(length, 2 * capacity), self._max_context)
        for name, old in self._history.items():
            grown = np.zeros((self.slots, capacity), old.dtype)
            grown[:, : old.shape[1]] = old
            self._history[name] = grown

    def add(self, request: Request) -> None:
        """Take the next slot. A retracted request comes back with what it had."""
        slot, prompt, sampling = self.n, len(request.prompt_ids), request.sampling
        partial = request.partial
        length = prompt + (0 if partial is None else len(partial.output_ids))
        self._reserve(length + 1)
        self.rows[slot] = (
            length,
            prompt,
            prompt + sampling.max_new_tokens,
            request.seed,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.ignore_eos,
            request.stream or bool(sampling.stop) or bool(sampling.stop_token_ids),
        )
        self.tokens[slot, :prompt] = request.prompt_ids
        if partial is not None:
            self.tokens[slot, prompt:length] = partial.output_ids
            self._history["logprobs"][slot, prompt:length] = partial.logprobs
            self._history["sampling_logprobs"][slot, prompt:length] = partial.sampling_logprobs
            self._history["versions"][slot, prompt:length] = partial.versions
        self.requests.append(request)
        self.n += 1

    def draw_keys(self, first: int, end: int) -> tuple[SeedArray, npt.NDArray[np.int64]]:
        """Seeds and the positions that the next tokens of slots [first, end) will have."""
        return self.rows["seed"][first:end], self.rows["length"][first:end]

    def append(
        self,
        first: int,
        tokens: npt.NDArray[np.int64],
        logprobs: FloatArray,
        sampling_logprobs: FloatArray,
        version: int,
    ) -> None:
        """One more token for each of the slots [first, first + len(tokens))."""
        end = first + len(tokens)
        at = self.rows["length"][first:end]
        self._reserve(int(at.max()) + 1)
        slots = np.arange(first, end)
        for name, values in (
            ("tokens", tokens),
            ("logprobs", logprobs),
            ("sampling_logprobs", sampling_logprobs),
            ("versions", version),
        ):
            self._history[name][slots, at] = values
        at += 1

    def output(self, slot: int, finish: FinishReason | None, matched: int | str | None = None) -> Output:
        part = slice(int(self.rows["prompt"][slot]), int(self.rows["length"][slot]))
        tokens, logprobs, sampling_logprobs, versions = (self._history[name][slot, part].copy() for name, _ in _HISTORY)
        return Output(tokens, logprobs, sampling_logprobs, versions, finish, matched)

    def remove(self, slots: Sequence[int]) -> Moves | None:
        """Free these slots and close the gaps from the end. The caller copies keys and values along."""
        gone = np.zeros(self.n, dtype=np.bool_)
        gone[np.asarray(slots, dtype=np.int64)] = True
        left = self.n - int(gone.sum())
        target = np.flatnonzero(gone[:left])
        source = left + np.flatnonzero(~gone[left:])
        if len(target):
            self.rows[target] = self.rows[source]
            for history in self._history.values():
                history[target] = history[source]
            for to, origin in zip(target.tolist(), source.tolist(), strict=True):
                self.requests[to] = self.requests[origin]
        del self.requests[left:]
        self.n = left
        if not len(target):
            return None
        return Moves(source, target, int(self.rows["length"][target].max()))

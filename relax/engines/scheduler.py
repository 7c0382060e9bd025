"""Continuous batching: which request runs, one step at a time. No threads; the decode thread calls it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax.engines.base import EngineError
from relax.engines.model_runner import ModelRunner
from relax.engines.requests import Output, Request, Result, empty_output
from relax.engines.sampling import SamplingRows, sample, uniforms
from relax.engines.slots import SlotTable
from relax.engines.stop_strings import DecodesTokens, match_in_tail
from relax.types import NO_VERSION, FinishReason, PolicyVersion

Delivery = tuple[Request, Result]


@dataclass(slots=True)
class Counters:
    """Since the start. busy_s: wall seconds inside forwards, sampling and their bookkeeping."""

    busy_s: float = 0.0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0
    retractions: int = 0
    steps: int = 0


class Scheduler:
    """Waiting requests enter in order of arrival as slots free up; all running ones advance together.

    version: stamped on every token drawn from now on.
    prefill_tokens: padded tokens of one prefill forward at most (one sequence always fits).
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: DecodesTokens,
        *,
        eos_ids: Sequence[int],
        slots: int,
        max_context: int,
        prefill_tokens: int = 8192,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.table = SlotTable(slots, max_context)
        self.waiting: deque[Request] = deque()
        self.version: PolicyVersion = NO_VERSION
        self.counters = Counters()
        self._tokenizer = tokenizer
        self._prefill_tokens = prefill_tokens
        self._clock = clock
        self._is_eos = np.zeros(runner.vocab_size, dtype=np.bool_)
        self._is_eos[[i for i in eos_ids if 0 <= i < runner.vocab_size]] = True
        self._settings: SamplingRows | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.table.n > 0

    def step(self) -> list[Delivery]:
        """Admit what fits, then one token for every running sequence. Returns what finished or is streamed."""
        began = self._clock()
        done: list[Delivery] = []
        with torch.inference_mode():
            self._admit(done)
            if self.table.n:
                self._decode(done)
        self.counters.steps += 1
        self.counters.busy_s += self._clock() - began
        return done

    def abort(self, request_id: str | None) -> list[Delivery]:
        """Finish one request, or all with None, with what it has."""
        done: list[Delivery] = []
        for request in [r for r in self.waiting if request_id is None or r.is_called(request_id)]:
            self.waiting.remove(request)
            partial = request.partial
            output = empty_output(FinishReason.ABORT) if partial is None else _with_finish(partial, FinishReason.ABORT)
            done.append((request, output))
        running = self.table.requests
        slots = [i for i, r in enumerate(running) if request_id is None or r.is_called(request_id)]
        done += [(running[i], self.table.output(i, FinishReason.ABORT)) for i in slots]
        self._free(slots)
        self.counters.aborted_requests += len(done)
        return done

    def retract(self) -> None:
        """Put every running request back to the head of the queue, keys and values forgotten."""
        running = list(self.table.requests)
        for slot, request in enumerate(running):
            request.partial = self.table.output(slot, None)
            request.retractions += 1
        self.counters.retractions += len(running)
        self._free(range(len(running)))
        self.waiting.extendleft(reversed(running))

    def fail_all(self, error: EngineError) -> list[Delivery]:
        """Every request ends with `error`."""
        done: list[Delivery] = [(request, error) for request in (*self.table.requests, *self.waiting)]
        self._free(range(self.table.n))
        self.waiting.clear()
        self.counters.failed_requests += len(done)
        return done

    def _admit(self, done: list[Delivery]) -> None:
        while self.waiting and self.table.n < self.table.slots:
            first = self.table.n
            width = 0
            while self.waiting and self.table.n < self.table.slots:
                request = self.waiting[0]
                length = len(request.prompt_ids) + (len(request.partial.output_ids) if request.partial else 0)
                width = max(width, length)
                if self.table.n > first and (self.table.n - first + 1) * width > self._prefill_tokens:
                    break
                self.table.add(self.waiting.popleft())
                if request.started_s is None:
                    request.started_s = time.monotonic()
            end = self.table.n
            lengths = self.table.rows["length"][first:end]
            logits = self.runner.prefill(
                first, [self.table.tokens[slot, : lengths[slot - first]] for slot in range(first, end)]
            )
            self.counters.prompt_tokens += int(lengths.sum())
            self._settings = None
            self._draw(first, logits, self._sampling_rows(first, end), done)

    def _decode(self, done: list[Delivery]) -> None:
        n = self.table.n
        last = self.table.rows["length"][:n] - 1
        tokens = self.table.tokens[np.arange(n), last].astype(np.int64)
        logits = self.runner.decode(tokens, last)
        if self._settings is None:
            self._settings = self._sampling_rows(0, n)
        self._draw(0, logits, self._settings, done)

    def _sampling_rows(self, first: int, end: int) -> SamplingRows:
        rows = self.table.rows[first:end]
        return SamplingRows.from_arrays(
            rows["temperature"], rows["top_k"], rows["top_p"], self.runner.vocab_size, self.runner.device
        )

    def _draw(self, first: int, logits: Tensor, settings: SamplingRows, done: list[Delivery]) -> None:
        """Sample slots [first, n), record the tokens, finish and free what ended."""
        drawn = sample(logits, settings, uniforms(*self.table.draw_keys(first, self.table.n)))
        tokens, logprobs, sampling_logprobs = (t.cpu().numpy() for t in drawn)
        self.table.append(first, tokens, logprobs, sampling_logprobs, self.version)
        self.counters.generated_tokens += len(tokens)
        self._finish(first, tokens, np.isfinite(logprobs), done)

    def _finish(
        self, first: int, tokens: npt.NDArray[np.int64], finite: npt.NDArray[np.bool_], done: list[Delivery]
    ) -> None:
        rows = self.table.rows[first : self.table.n]
        stopped = self._is_eos[tokens] & ~rows["ignore_eos"]
        ended = stopped | (rows["length"] >= rows["limit"]) | ~finite
        matched: dict[int, int | str] = {}
        for offset in np.flatnonzero(rows["watched"]).tolist():
            hit = self._stop_of(first + offset, int(tokens[offset]))
            if hit is not None:
                matched[offset] = hit
                ended[offset] = True
            elif not ended[offset] and self.table.requests[first + offset].stream:
                done.append((self.table.requests[first + offset], self.table.output(first + offset, None)))
        offsets = np.flatnonzero(ended).tolist()
        if not offsets:
            return
        for offset in offsets:
            slot = first + offset
            request = self.table.requests[slot]
            if not finite[offset]:
                self.counters.failed_requests += 1
                done.append((request, EngineError(f"non-finite logits at policy version {self.version}")))
            elif stopped[offset]:
                done.append((request, self.table.output(slot, FinishReason.STOP, int(tokens[offset]))))
            elif offset in matched:
                done.append((request, self.table.output(slot, FinishReason.STOP, matched[offset])))
            else:
                done.append((request, self.table.output(slot, FinishReason.LENGTH)))
        self.counters.finished_requests += int(finite[offsets].sum())
        self._free([first + offset for offset in offsets])

    def _stop_of(self, slot: int, token: int) -> int | str | None:
        sampling = self.table.requests[slot].sampling
        if token in sampling.stop_token_ids:
            return token
        if not sampling.stop:
            return None
        row = self.table.rows[slot]
        generated = self.table.tokens[slot, row["prompt"] : row["length"]]
        return match_in_tail(generated, self._tokenizer, sampling.stop)

    def _free(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        self._settings = None
        moves = self.table.remove(slots)
        if moves is not None:
            device = self.runner.device
            with torch.inference_mode():
                self.runner.cache.move(
                    torch.from_numpy(moves.source).to(device), torch.from_numpy(moves.target).to(device), moves.span
                )


def _with_finish(output: Output, finish: FinishReason) -> Output:
    return Output(output.output_ids, output.logprobs, output.sampling_logprobs, output.versions, finish)

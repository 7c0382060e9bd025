"""What the scheduler works on: requests, their outputs, and where outputs go."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from relax.engines.base import EngineError
from relax.types import FinishReason, FloatArray, IntArray, SamplingParams


@dataclass(frozen=True, slots=True)
class Output:
    """What a request has so far; final unless `finish` is None. All arrays are [N], end token included.

    logprobs and sampling_logprobs: float32 of `LogprobMode.TEMPERATURE` and `SAMPLING`; versions: int32.
    matched: the token id or the stop string that ended it.
    """

    output_ids: IntArray
    logprobs: FloatArray
    sampling_logprobs: FloatArray
    versions: IntArray
    finish: FinishReason | None
    matched: int | str | None = None


Result = Output | EngineError


class Sink(Protocol):
    def deliver(self, batch: Sequence[tuple[Request, Result]]) -> None:
        """Called by the decode thread once per step with everything for this sink. Must not block or raise."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate. prompt_ids: int32 [P], P >= 1; seed: unsigned 64 bit."""

    request_id: str
    prompt_ids: IntArray
    sampling: SamplingParams
    seed: int
    sink: Sink
    stream: bool = False
    parent_id: str | None = None
    """The id of the call that a batch or n > 1 belongs to: an abort of it reaches all its requests."""
    partial: Output | None = None
    """What it had generated when it was retracted."""
    retractions: int = 0
    created_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None

    def is_called(self, request_id: str) -> bool:
        return request_id in (self.request_id, self.parent_id)


def empty_output(finish: FinishReason) -> Output:
    ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Output(ints, floats, floats, ints, finish)


class FutureSink:
    """For callers in threads: one future per request."""

    def __init__(self) -> None:
        self._futures: dict[int, Future[Output]] = {}
        self._lock = threading.Lock()

    def expect(self, request: Request) -> Future[Output]:
        future: Future[Output] = Future()
        with self._lock:
            self._futures[id(request)] = future
        return future

    def deliver(self, batch: Sequence[tuple[Request, Result]]) -> None:
        for request, result in batch:
            if isinstance(result, Output) and result.finish is None:
                continue
            with self._lock:
                future = self._futures.pop(id(request), None)
            if future is None:
                continue
            if isinstance(result, EngineError):
                future.set_exception(result)
            else:
                future.set_result(result)

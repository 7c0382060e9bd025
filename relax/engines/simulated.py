"""Engine backend `simulated`: the protocol of the embedded engine over a time model instead of a model.

A clock follows the wall clock `time_scale` times as fast; between two changes of its batch every running sequence gains
tokens at one rate (`relax.simulation.engine`). Lengths are log-normal and a function of the request's seed alone.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from relax.config.run import RunConfig
from relax.config.simulation import SimulationConfig
from relax.data.tokenizer import Tokenizer
from relax.engines.base import EngineError, WeightReport
from relax.engines.embedded import BadRequest, PauseMode
from relax.engines.requests import Output, Request, Result
from relax.engines.status import EngineStatus, RateMeter
from relax.engines.thread import EngineThread
from relax.simulation.clock import Clock
from relax.simulation.engine import LOGPROB, Sample, SimEngine
from relax.simulation.turns import Lengths
from relax.types import NO_VERSION, FinishReason, FloatArray, IntArray, PolicyVersion, SamplingParams
from relax.weights.digest import tensors_digest
from relax.weights.manifest import WeightsError
from relax.weights.store import ReadableVersion


class SimulatedEngine:
    """Every method may be called from any thread: one lock guards clock and batch, and a thread of its own wakes for
    the next event."""

    model_class = "Simulated"

    def __init__(self, run: RunConfig, profile: SimulationConfig, tokenizer: Tokenizer, model_path: str = "") -> None:
        self.tokenizer, self.model_path = tokenizer, model_path
        self.vocab_size = tokenizer.vocab_size
        self.slots, self.max_context = profile.engine.slots, run.max_tokens
        self.paused = False
        self._profile = profile
        self._lengths = Lengths(run, profile)
        self._limit = run.max_response_tokens
        self._clock = Clock()
        self._batch = SimEngine(self._clock, profile.engine, self._finished)
        self._started_s = time.monotonic()
        self._waiting: deque[Request] = deque()
        self._request_of: dict[Sample, Request] = {}
        self._failing: set[Sample] = set()
        self._attempts: Counter[int] = Counter()
        self._version = NO_VERSION
        self._weights: Mapping[str, Tensor] = {}
        self._digest = ""
        self._counts: Counter[str] = Counter()
        self._stall_s = 0.0
        self._rate = RateMeter()
        self._thread = EngineThread("relax-simulated", self._run, self._end)
        self._wake = self._thread.wake

    # -- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Raises `EngineError` past the deadline."""
        self._thread.close(deadline_s)

    def healthy(self) -> bool:
        return self._thread.healthy()

    @property
    def failure(self) -> str | None:
        return self._thread.failure

    @property
    def version(self) -> PolicyVersion:
        return self._version

    def _run(self) -> None:
        with self._wake:
            while not self._thread.closing:
                self._clock.advance(self._now())
                due = self._clock.next_at()
                wait_s = None if due is None else max(0.0, (due - self._now()) / self._profile.time_scale)
                self._wake.wait(wait_s)

    def _now(self) -> float:
        return (time.monotonic() - self._started_s) * self._profile.time_scale

    # -- requests -----------------------------------------------------------------------------------------

    def check(self, prompt_ids: IntArray, sampling: SamplingParams) -> None:
        """Raises `BadRequest` for what does not fit."""
        if not 0 < len(prompt_ids) <= self.max_context - sampling.max_new_tokens:
            raise BadRequest(
                f"{len(prompt_ids)} prompt tokens and max_new_tokens {sampling.max_new_tokens} do not fit the context "
                f"of {self.max_context} tokens"
            )

    def submit(self, requests: Sequence[Request]) -> None:
        with self._wake:
            self._thread.check_running()
            self._clock.advance(self._now())
            self._waiting.extend(requests)
            self._fill()
            self._wake.notify()

    def abort(self, request_id: str | None) -> None:
        """One request, or all with None, ends with what it has."""
        with self._wake:
            self._clock.advance(self._now())
            hit = [s for s, r in self._request_of.items() if request_id is None or r.is_called(request_id)]
            self._batch.cancel(hit)
            for sample in hit:
                self._counts["aborted"] += 1
                self._deliver(sample, self._output(sample, FinishReason.ABORT))
            gone = [r for r in self._waiting if request_id is None or r.is_called(request_id)]
            for request in gone:
                self._waiting.remove(request)
                empty = Sample("", 0, 0, 0)
                self._request_of[empty] = request
                self._deliver(empty, self._output(empty, FinishReason.ABORT))
            self._fill()
            self._wake.notify()

    def pause(self, mode: PauseMode, deadline_s: float) -> None:
        raise BadRequest("a simulated engine takes weights without a pause")

    def resume(self, deadline_s: float) -> None:
        """It never pauses."""

    def score(self, prompts: Sequence[IntArray], deadline_s: float) -> list[FloatArray]:
        return [np.where(np.arange(len(prompt)) > 0, np.float32(LOGPROB), np.float32(0.0)) for prompt in prompts]

    def _fill(self) -> None:
        """Start what waits while there are slots; equal prompts are prefilled once."""
        started: list[Sample] = []
        prompts: set[bytes] = set()
        while self._waiting and len(started) < self._batch.free:
            request = self._waiting.popleft()
            started.append(self._sample(request))
            prompts.add(request.prompt_ids.tobytes())
        if started:
            self._batch.start(started, len(prompts) * self._profile.lengths.prompt_tokens)

    def _sample(self, request: Request) -> Sample:
        limit = request.sampling.max_new_tokens
        [length] = self._lengths.drawn(request.seed, 1)
        self._attempts[request.seed] += 1
        luck = np.random.default_rng([request.seed, self._attempts[request.seed]])
        failing = bool(luck.random() < self._profile.failure_share)
        if failing:
            length = max(1, round(length * luck.random()))
        sample = Sample(request.request_id, 0, min(length, limit), self._profile.lengths.prompt_tokens)
        self._request_of[sample] = request
        if failing:
            self._failing.add(sample)
        return sample

    def _finished(self, sample: Sample) -> None:
        request = self._request_of[sample]
        if sample in self._failing:
            self._failing.discard(sample)
            self._counts["failed"] += 1
            self._deliver(sample, EngineError("a simulated failure (run.simulation.failure_share)"))
        else:
            self._counts["finished"] += 1
            cut = sample.length >= min(self._limit, request.sampling.max_new_tokens)
            self._deliver(sample, self._output(sample, FinishReason.LENGTH if cut else FinishReason.STOP))
        self._clock.after(0.0, self._fill)

    def _output(self, sample: Sample, finish: FinishReason) -> Output:
        request = self._request_of[sample]
        count = sample.length if finish is not FinishReason.ABORT else int(sample.done)
        ids = np.random.default_rng(request.seed).integers(0, self.vocab_size, count, dtype=np.int32)
        logprobs = np.full(count, LOGPROB, np.float32)
        self._counts["tokens"] += count
        return Output(ids, logprobs, logprobs, _versions(sample, count), finish)

    def _deliver(self, sample: Sample, result: Result) -> None:
        request = self._request_of.pop(sample)
        request.sink.deliver([(request, result)])

    def _end(self, error: EngineError) -> None:
        with self._wake:
            self._batch.cancel(self._batch.running)
            for sample in list(self._request_of):
                self._deliver(sample, error)
            while self._waiting:
                request = self._waiting.popleft()
                request.sink.deliver([(request, error)])

    # -- weights ------------------------------------------------------------------------------------------

    def update_weights_from_disk(self, folder: str, version: PolicyVersion, deadline_s: float) -> WeightReport:
        """Takes the transfer time of the model; digests are checked as by a real engine. Raises `EngineError`."""
        transfer_s = self._profile.trainer.publish_s / self._profile.time_scale
        if transfer_s > deadline_s:
            raise EngineError(f"the simulated transfer takes {transfer_s:.3g} s, the deadline is {deadline_s:.3g} s")
        time.sleep(transfer_s)
        try:
            published = ReadableVersion(Path(folder))
            weights = {name: tensor.clone() for name, tensor in published.tensors()}
        except (WeightsError, OSError) as error:
            self._counts["failed_updates"] += 1
            raise EngineError(str(error)) from error
        digest = tensors_digest(weights.items())
        if published.manifest.version != version or digest != published.manifest.digest:
            self._counts["failed_updates"] += 1
            raise EngineError(f"{folder} is no version {version} with digest {digest}")
        with self._wake:
            self._clock.advance(self._now())
            self._stall_s += self._profile.engine.swap_s / self._profile.time_scale if self._batch.running else 0.0
            self._batch.take(int(version))
            self._version, self._weights, self._digest = version, weights, digest
            self._counts["updates"] += 1
            self._wake.notify()
        return WeightReport(version, digest)

    def checksums(self, deadline_s: float) -> tuple[str, dict[str, str]]:
        return self._digest, {name: tensors_digest([(name, tensor)]) for name, tensor in self._weights.items()}

    def status(self) -> EngineStatus:
        with self._wake:
            self._clock.advance(self._now())
            self._batch.settle()
            running = self._batch.running
            used = sum(sample.prompt + int(sample.done) for sample in running)
            return EngineStatus(
                version=self._version,
                healthy=self.healthy(),
                failure=self.failure,
                paused=False,
                running=len(running),
                waiting=len(self._waiting),
                slots=self.slots,
                max_context=self.max_context,
                used_tokens=used,
                gen_throughput=self._rate.value(time.monotonic(), self._counts["tokens"]),
                busy_s=self._batch.busy_s / self._profile.time_scale,
                generated_tokens=self._counts["tokens"],
                prompt_tokens=0,
                finished_requests=self._counts["finished"],
                aborted_requests=self._counts["aborted"],
                failed_requests=self._counts["failed"],
                retractions=0,
                steps=0,
                swap_stall_s=self._stall_s,
                weight_updates=self._counts["updates"],
                failed_weight_updates=self._counts["failed_updates"],
                weight_load_s=self._profile.trainer.publish_s / self._profile.time_scale,
            )


def _versions(sample: Sample, count: int) -> IntArray:
    """int32 [count]: the version of each token, from the amounts that each version drew."""
    versions = np.full(count, max(sample.tokens_by_version, default=NO_VERSION), np.int32)
    drawn, begin = 0.0, 0
    for version, amount in sorted(sample.tokens_by_version.items()):
        drawn += amount
        end = min(count, round(drawn))
        versions[begin:end] = version
        begin = end
    return versions

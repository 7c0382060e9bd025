"""The embedded engine: one decode thread that owns the model and the cache, fed through an inbox."""

from __future__ import annotations

import enum
import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relax.config.roles import EngineConfig
from relax.data.tokenizer import Tokenizer
from relax.engines.base import EngineError, WeightReport
from relax.engines.live_weights import LiveWeights, TensorsDigest
from relax.engines.model_runner import ModelRunner
from relax.engines.requests import Request
from relax.engines.scheduler import Delivery, Scheduler
from relax.engines.status import EngineStatus, RateMeter
from relax.engines.stop_strings import DecodesTokens
from relax.engines.thread import EngineThread
from relax.types import FloatArray, IntArray, ModelError, PolicyVersion, SamplingParams
from relax.weights.digest import tensors_digest
from relax.weights.manifest import WeightsError
from relax.weights.store import ReadableVersion

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # the manager imports this module and loads no model


class BadRequest(EngineError):
    """The request itself cannot be served; nothing was started."""


class PauseMode(enum.StrEnum):
    IN_PLACE = "in_place"
    """Running requests keep their slots, keys and values."""
    RETRACT = "retract"
    """Running requests go back to the queue; their keys and values are computed again."""
    ABORT = "abort"
    """Running and waiting requests end with what they have."""


class EmbeddedEngine:
    """Generates with continuous batching and takes new weights between two decode steps.

    Every method may be called from any thread. A loaded engine is at no version (`NO_VERSION`) until
    its first update. The decode thread sleeps on a condition while there is nothing to do; an exception
    in it is kept, ends every request with its text and makes the engine unhealthy for good.

    retract_on_swap: a running request's keys and values are computed anew under new weights; otherwise they stay.
    skip_adoption: an update only claims the version and its digest, for tests of the safeguards.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: DecodesTokens,
        *,
        eos_ids: Sequence[int],
        slots: int,
        max_context: int,
        device: str = "cpu",
        skip_adoption: bool = False,
        threads: int | None = None,
        model_path: str = "",
        retract_on_swap: bool = False,
        digest: TensorsDigest = tensors_digest,
    ) -> None:
        self.tokenizer = tokenizer
        self.slots = slots
        self.max_context = max_context
        self.model_path = model_path
        self.model_class = type(model).__name__
        self._runner = ModelRunner(model, slots=slots, max_context=max_context, device=torch.device(device))
        self.vocab_size = self._runner.vocab_size
        self._scheduler = Scheduler(self._runner, tokenizer, eos_ids=eos_ids, slots=slots, max_context=max_context)
        self._weights = LiveWeights(model, digest)
        self._skip_adoption = skip_adoption
        self._retract_on_swap = retract_on_swap
        self._claimed_digest: str | None = None
        self._threads = threads
        self._update_lock = threading.Lock()
        self._inbox: deque[tuple[Future[None] | None, Callable[[], Sequence[Delivery]]]] = deque()
        self._executing: Future[None] | None = None
        self._paused = False
        self._thread = EngineThread("relax-decode", self._run, self._end)
        self._swap_stall_s = 0.0
        self._updates = 0
        self._failed_updates = 0
        self._load_s = 0.0
        self._rate = RateMeter()

    # -- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Stop the thread; requests that are left end with an error. Raises `EngineError` past the deadline."""
        self._thread.close(deadline_s)

    def healthy(self) -> bool:
        return self._thread.healthy()

    @property
    def failure(self) -> str | None:
        """Text of the exception that ended the decode thread."""
        return self._thread.failure

    @property
    def version(self) -> PolicyVersion:
        return self._scheduler.version

    @property
    def paused(self) -> bool:
        return self._paused

    # -- requests -----------------------------------------------------------------------------------------

    def check(self, prompt_ids: IntArray, sampling: SamplingParams) -> None:
        """Raises `BadRequest` for what this engine cannot generate."""
        if not len(prompt_ids):
            raise BadRequest("input_ids is empty")
        if (prompt_ids < 0).any() or (prompt_ids >= self.vocab_size).any():
            raise BadRequest(f"input_ids holds an id outside [0, {self.vocab_size})")
        total = len(prompt_ids) + sampling.max_new_tokens
        if sampling.max_new_tokens < 1 or total > self.max_context:
            raise BadRequest(
                f"{len(prompt_ids)} prompt tokens and max_new_tokens {sampling.max_new_tokens} "
                f"do not fit the context of {self.max_context} tokens"
            )

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue checked requests in order. Raises `EngineError` if the decode thread has ended."""

        def queue() -> Sequence[Delivery]:
            self._scheduler.waiting.extend(requests)
            return ()

        self._post(queue)

    def abort(self, request_id: str | None) -> None:
        """Ask one request, or all with None, to end with what they have. Returns at once."""
        self._post(lambda: self._scheduler.abort(request_id))

    def pause(self, mode: PauseMode, deadline_s: float) -> None:
        """Hold generation from the next step on; new requests wait."""

        def hold() -> Sequence[Delivery]:
            self._paused = True
            if mode is PauseMode.RETRACT:
                self._scheduler.retract()
            return self._scheduler.abort(None) if mode is PauseMode.ABORT else ()

        self._call(hold, deadline_s, f"pause ({mode})")

    def resume(self, deadline_s: float) -> None:
        def go() -> Sequence[Delivery]:
            self._paused = False
            return ()

        self._call(go, deadline_s, "continue")

    def score(self, prompts: Sequence[IntArray], deadline_s: float) -> list[FloatArray]:
        """Log-probs of given tokens (int32 [T] each) under the live weights at temperature 1, without any cache.

        float32 [T] each, 0 at position 0. Runs between two decode steps.
        """
        scores: list[FloatArray] = []

        def compute() -> Sequence[Delivery]:
            scores.extend(self._runner.score(prompts))
            return ()

        self._call(compute, deadline_s, "score")
        return scores

    # -- weights ------------------------------------------------------------------------------------------

    def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion, expected_digest: str, deadline_s: float
    ) -> WeightReport:
        """Adopt `tensors` as `version`, all or nothing (B4); requests go on (B5).

        Loading and checking run in the calling thread into a second copy of the weights; the decode thread
        exchanges the copies between two steps. Returns the digest of the live weights (B2). Raises
        `EngineError` with the old weights and version in force.
        """
        ends = time.monotonic() + deadline_s
        if not self._update_lock.acquire(timeout=deadline_s):
            raise EngineError(f"another weight update was still running after {deadline_s} s")
        try:
            report = self._adopt(_until(tensors, ends, deadline_s), version, expected_digest, ends)
        except (EngineError, WeightsError, OSError) as error:
            self._failed_updates += 1
            if isinstance(error, EngineError):
                raise
            raise EngineError(str(error)) from error
        finally:
            self._update_lock.release()
        self._updates += 1
        self._load_s = time.monotonic() - ends + deadline_s
        return report

    def update_weights_from_disk(self, folder: str, version: PolicyVersion, deadline_s: float) -> WeightReport:
        """`update_weights` from a published version's folder (see `relax.weights`)."""
        try:
            published = ReadableVersion(Path(folder))
        except WeightsError as error:
            self._failed_updates += 1
            raise EngineError(str(error)) from error
        manifest = published.manifest
        if manifest.version != version:
            self._failed_updates += 1
            raise EngineError(f"{folder} holds version {manifest.version}, not {version}")
        try:
            return self.update_weights(published.tensors(), version, manifest.digest, deadline_s)
        except EngineError as error:
            try:
                published.verify()
            except WeightsError as corrupt:
                raise EngineError(f"{error}: {corrupt}") from error
            raise

    def checksums(self, deadline_s: float) -> tuple[str, dict[str, str]]:
        """Digest of the live weights, and one per tensor."""
        if not self._update_lock.acquire(timeout=deadline_s):
            raise EngineError(f"a weight update was still running after {deadline_s} s")
        try:
            return self._claimed_digest or self._weights.digest(), self._weights.checksums()
        finally:
            self._update_lock.release()

    def _adopt(
        self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion, expected_digest: str, ends: float
    ) -> WeightReport:
        if version < self.version:
            raise EngineError(f"version {version} is older than the engine's {self.version}")
        if not self._skip_adoption:
            self._weights.stage(tensors, expected_digest)
        before = self.version
        self._swap(version, ends)
        if self._skip_adoption:
            self._claimed_digest = expected_digest
            return WeightReport(version, expected_digest)
        live = self._weights.digest()
        if live != expected_digest:
            self._swap(before, time.monotonic() + 60.0)
            raise EngineError(f"live weights have digest {live} after the swap, not {expected_digest}; taken back")
        return WeightReport(version, live)

    def _swap(self, version: PolicyVersion, ends: float) -> None:
        def exchange() -> Sequence[Delivery]:
            began = time.perf_counter()
            if not self._skip_adoption:
                self._weights.exchange()
                if self._retract_on_swap:
                    self._scheduler.retract()
            self._scheduler.version = version
            self._swap_stall_s += time.perf_counter() - began
            return ()

        self._call(exchange, max(0.0, ends - time.monotonic()), "weight swap")

    # -- what it says of itself ---------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """A snapshot; counters may be one step apart from each other."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        running, waiting = scheduler.table.n, len(scheduler.waiting)
        used = int(scheduler.table.rows["length"][:running].sum())
        return EngineStatus(
            version=self.version,
            healthy=self.healthy(),
            failure=self.failure,
            paused=self._paused,
            running=running,
            waiting=waiting,
            slots=self.slots,
            max_context=self.max_context,
            used_tokens=used,
            gen_throughput=self._rate.value(time.monotonic(), counters.generated_tokens),
            busy_s=counters.busy_s,
            generated_tokens=counters.generated_tokens,
            prompt_tokens=counters.prompt_tokens,
            finished_requests=counters.finished_requests,
            aborted_requests=counters.aborted_requests,
            failed_requests=counters.failed_requests,
            retractions=counters.retractions,
            steps=counters.steps,
            swap_stall_s=self._swap_stall_s,
            weight_updates=self._updates,
            failed_weight_updates=self._failed_updates,
            weight_load_s=self._load_s,
        )

    # -- the decode thread --------------------------------------------------------------------------------

    def _post(self, command: Callable[[], Sequence[Delivery]], future: Future[None] | None = None) -> None:
        with self._thread.wake:
            self._thread.check_running()
            self._inbox.append((future, command))
            self._thread.wake.notify()

    def _call(self, command: Callable[[], Sequence[Delivery]], deadline_s: float, what: str) -> None:
        future: Future[None] = Future()
        self._post(command, future)
        try:
            future.result(deadline_s)
        except FutureTimeout:
            if future.cancel():
                raise EngineError(f"{what}: no step boundary within {deadline_s:.3g} s; not done") from None
            future.result()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # counts per thread under OpenMP
        while self._next_commands():
            if not self._paused and self._scheduler.has_work:
                _deliver(self._scheduler.step())

    def _next_commands(self) -> bool:
        """Wait for something to do, carry out what callers posted. False: the engine closes."""
        thread = self._thread
        with thread.wake:
            while not (self._inbox or thread.closing or (self._scheduler.has_work and not self._paused)):
                thread.wake.wait()
            if thread.closing:
                return False
            commands = list(self._inbox)
            self._inbox.clear()
        for future, command in commands:
            if future is not None and not future.set_running_or_notify_cancel():
                continue
            self._executing = future
            _deliver(command())
            if future is not None:
                future.set_result(None)
        self._executing = None
        return True

    def _end(self, error: EngineError) -> None:
        commands = list(self._inbox)  # nobody adds to it any more
        self._inbox.clear()
        for future, command in commands:
            if future is None:
                _deliver(command())  # queues what was submitted, so that it ends with the error below
            elif future.set_running_or_notify_cancel():
                future.set_exception(error)
        if self._executing is not None and not self._executing.done():
            self._executing.set_exception(error)
        _deliver(self._scheduler.fail_all(error))


def _deliver(deliveries: Sequence[Delivery]) -> None:
    if not deliveries:
        return
    by_sink: dict[int, list[Delivery]] = {}
    for delivery in deliveries:
        by_sink.setdefault(id(delivery[0].sink), []).append(delivery)
    for batch in by_sink.values():
        batch[0][0].sink.deliver(batch)


def _until(tensors: Iterable[tuple[str, Tensor]], ends: float, deadline_s: float) -> Iterable[tuple[str, Tensor]]:
    for pair in tensors:
        if time.monotonic() > ends:
            raise EngineError(f"the weights were not loaded within {deadline_s} s")
        yield pair


def load_engine(
    model_folder: str | Path,
    config: EngineConfig,
    max_context: int,
    threads: int,
    *,
    skip_adoption: bool = False,
    trust_remote_code: bool = False,
) -> EmbeddedEngine:
    """An engine over a Hugging Face folder, not started. Raises `ModelError` if the folder cannot be used."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    tokenizer = Tokenizer.load(Path(model_folder), trust_remote_code=trust_remote_code)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(model_folder),
            dtype=getattr(torch, config.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{model_folder} is no usable causal language model: {error}") from error
    # Without this every full garbage collection walks the libraries' million objects: a stall of 0.2 s per
    # some ten thousand requests.
    gc.collect()
    gc.freeze()
    return EmbeddedEngine(
        model,
        tokenizer,
        eos_ids=tokenizer.eos_ids,
        slots=config.slots,
        max_context=max_context,
        skip_adoption=skip_adoption,
        threads=threads,
        model_path=str(model_folder),
        retract_on_swap=config.swap == "retract",
    )

"""Scores many requests at once in worker processes that are killed when they hang or crash (B19).

Each worker is driven by one task (`_drive`), which sends it a batch and reads one result per call. A worker
scores in order, so the call that runs is always the first without a result: the time limit is measured on
it alone, and when the process has to be killed, the other members of its batch go back to the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from relax.config.roles import RewardConfig
from relax.rewards.base import RewardConfigError, RewardPoolError, RewardRequest, RewardResult
from relax.rewards.process import WorkerDied, WorkerProcess, WorkerStartError
from relax.rewards.wire import SKIP_REST, encode_array, encode_body
from relax.types import Json, RewardState

START_DEADLINE_S = 120.0
"""Importing reasoning-gym or sympy takes seconds on a busy core."""
START_ATTEMPTS = 3
"""Replacements that fail in a row before the pool gives up."""
MAX_BATCH = 64
"""Calls in one frame."""
BATCH_TARGET_S = 0.05
"""A batch of slow calls is kept about this long, so that other workers find something to do."""
CRASH_ATTEMPTS = 2
"""A call whose worker died runs once more, alone on a fresh worker: only then is the crash surely its own."""
RECYCLE_SHARE = 0.5
"""A worker that keeps more than this share of reward.memory_mb is replaced, before an innocent call lacks memory."""
HAND_OVER_S = 0.1
"""A call that runs longer gives the calls behind it in its batch back, for other workers."""
GRACE_S = 0.05
"""After the limit one more look at the pipe: a stall of the event loop must not read as a slow reward."""


@dataclass(slots=True)
class PoolCounters:
    """Since the start of the pool."""

    calls: int = 0
    """Calls answered."""
    by_state: Counter[RewardState] = field(default_factory=Counter)
    """Answers by state."""
    retries: Counter[str] = field(default_factory=Counter)
    """Calls queued again. "innocent": a batch-mate was killed. "handed_over": a batch-mate was slow. "crash": its
    own worker died the first time."""
    worker_restarts: Counter[str] = field(default_factory=Counter)
    """Replacements by reason: "timeout", "crash", "memory" (kept too much of its limit)."""


@dataclass(slots=True, eq=False)
class _Call:
    body: bytes
    """The request as JSON."""
    future: asyncio.Future[RewardResult]
    crashes: int = 0
    """Workers that died while this call ran. Above 0 it runs alone."""


@dataclass(slots=True)
class _Sent:
    """A batch at a worker."""

    pending: deque[_Call]
    """Without a result, in the order in which the worker scores."""
    slow: _Call | None = None
    """Set once the calls behind this one went back to the queue."""


class RewardPool:
    """`score` may be called concurrently, from the event loop that ran `start`.

    On Linux a worker also ends with the thread that started it, so that loop's thread must outlive the pool.
    """

    def __init__(self, config: RewardConfig, *, max_response_tokens: int, base: Path) -> None:
        """`base` is the folder that `file.py:function` parts are relative to."""
        self.counters = PoolCounters()
        self._config = config
        self._spec = spec_json(config, max_response_tokens)
        self._base = base
        self._memory_bytes = config.memory_mb << 20
        self._queue: deque[_Call] = deque()
        self._open: set[_Call] = set()
        self._has_work = asyncio.Event()
        self._workers: set[WorkerProcess] = set()
        self._drivers: list[asyncio.Task[None]] = []
        self._broken: RewardPoolError | None = RewardPoolError("the reward pool is not started")
        self._mean_call_s = 0.0

    async def start(self) -> None:
        """Start all workers.

        Raises:
            RewardConfigError: a function does not load; the worker's words are in the message.
        """
        starts = [self._start_worker() for _ in range(self._config.workers)]
        started = await asyncio.gather(*starts, return_exceptions=True)
        failed = [outcome for outcome in started if isinstance(outcome, BaseException)]
        if failed:
            await self.close()
            if isinstance(failed[0], WorkerStartError):
                raise RewardConfigError(str(failed[0])) from failed[0]
            raise failed[0]
        self._broken = None
        self._drivers = [asyncio.create_task(self._drive(worker)) for worker in self._workers]
        for driver in self._drivers:
            driver.add_done_callback(self._driver_ended)

    async def score(self, request: RewardRequest) -> RewardResult:
        """Score one response. A failure of the function is in the result's state, never an exception.

        `timeout_s` counts from when a worker begins this very call; waiting in the queue is not limited here.

        Raises:
            RewardPoolError: the pool is closed, not started, or its workers do not start any more.
            TypeError: label or metadata hold something that is no JSON value.
        """
        if self._broken is not None:
            raise self._broken
        call = _Call(encode_body(request.to_json()), asyncio.get_running_loop().create_future())
        self._open.add(call)
        self._queue.append(call)
        self._has_work.set()
        try:
            return await call.future
        finally:
            self._open.discard(call)

    @property
    def queued(self) -> int:
        """Calls that no worker has taken up."""
        return len(self._queue)

    @property
    def worker_pids(self) -> frozenset[int]:
        return frozenset(worker.pid for worker in self._workers)

    async def close(self) -> None:
        """Kill all workers and fail the open calls with `RewardPoolError`. May be called twice."""
        self._break(RewardPoolError("the reward pool is closed"))
        for driver in self._drivers:
            driver.cancel()
        await asyncio.gather(*self._drivers, return_exceptions=True)
        self._drivers = []
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        self._workers.clear()

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _drive(self, worker: WorkerProcess) -> None:
        """Feed one worker, and its replacements, until the pool is closed or broken."""
        while self._broken is None:
            reason = await self._run_batch(worker, await self._take())
            if reason is not None:
                self.counters.worker_restarts[reason] += 1
                self._workers.discard(worker)
                await worker.kill()
                worker = await self._replace()

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        if not driver.cancelled() and (error := driver.exception()) is not None:
            self._break(RewardPoolError(f"the reward pool cannot go on: {error}"))

    async def _take(self) -> list[_Call]:
        """The next batch; a call that has to run alone makes one of its own."""
        batch: list[_Call] = []
        while not batch:
            while not self._queue:
                self._has_work.clear()
                await self._has_work.wait()
            size = batch_size(len(self._queue), self._config.workers, self._mean_call_s)
            while self._queue and len(batch) < size and not (batch and (batch[0].crashes or self._queue[0].crashes)):
                call = self._queue.popleft()
                if not call.future.done():  # its caller may have been cancelled
                    batch.append(call)
        return batch

    async def _run_batch(self, worker: WorkerProcess, batch: list[_Call]) -> str | None:
        """Score a batch; the reason for which the worker has to be replaced, if it has.

        Only `close` cancels, and it fails the open calls itself.
        """
        loop = asyncio.get_running_loop()
        sent = _Sent(deque(batch))
        begun = loop.time()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await worker.send_bytes(encode_array(call.body for call in batch))
            while "grown_bytes" not in (frame := await self._receive(worker, sent)):
                result = RewardResult.from_json(frame)
                if result.state is RewardState.CRASHED:
                    raise WorkerDied(result.error)
                self._answer(sent.pending.popleft(), result)
        except TimeoutError:
            self._blame(sent, RewardState.TIMEOUT, f"no result within reward.timeout_s = {self._config.timeout_s}")
            return "timeout"
        except WorkerDied as error:
            self._blame(sent, RewardState.CRASHED, f"the reward worker died: {error}")
            return "crash"
        self._mean_call_s = (loop.time() - begun) / len(batch)
        return "memory" if frame["grown_bytes"] > RECYCLE_SHARE * self._memory_bytes else None

    async def _receive(self, worker: WorkerProcess, sent: _Sent) -> Json:
        """The next frame within the limit of one call; a slow call loses its followers to the other workers."""
        limit_s = self._config.timeout_s
        if self._config.workers > 1 and len(sent.pending) > 1 and sent.slow is None:
            patience_s = min(HAND_OVER_S, limit_s / 2)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    return await worker.receive()
            limit_s -= patience_s
            sent.slow = sent.pending[0]
            self._requeue(list(sent.pending)[1:], "handed_over")
            await worker.send(SKIP_REST)
        try:
            async with asyncio.timeout(limit_s):
                return await worker.receive()
        except TimeoutError:
            async with asyncio.timeout(GRACE_S):
                return await worker.receive()

    def _blame(self, sent: _Sent, state: RewardState, error: str) -> None:
        """The first pending call was running when its worker had to go; the others are innocent."""
        if not sent.pending:
            return
        culprit, *innocent = sent.pending
        if sent.slow is None:
            self._requeue(innocent, "innocent")
        elif culprit is not sent.slow:
            return  # begun before SKIP_REST arrived: it is queued again already, and answered there
        culprit.crashes += state is RewardState.CRASHED
        if state is RewardState.CRASHED and culprit.crashes < CRASH_ATTEMPTS:
            self._requeue([culprit], "crash")
        else:
            self._answer(culprit, RewardResult.failure(state, error))

    def _requeue(self, calls: list[_Call], reason: str) -> None:
        self.counters.retries[reason] += len(calls)
        self._queue.extendleft(reversed(calls))
        self._has_work.set()

    def _answer(self, call: _Call, result: RewardResult) -> None:
        if call.future.done():  # answered by another worker, or given up by its caller
            return
        self.counters.calls += 1
        self.counters.by_state[result.state] += 1
        call.future.set_result(result)

    async def _start_worker(self) -> WorkerProcess:
        worker = await WorkerProcess.start(self._spec, self._base, self._memory_bytes, START_DEADLINE_S)
        self._workers.add(worker)
        return worker

    async def _replace(self) -> WorkerProcess:
        """A fresh worker.

        Raises:
            WorkerStartError: `START_ATTEMPTS` in a row did not start.
        """
        for _ in range(START_ATTEMPTS - 1):
            with contextlib.suppress(WorkerStartError):
                return await self._start_worker()
        return await self._start_worker()

    def _break(self, error: RewardPoolError) -> None:
        self._broken = error
        for call in self._open:
            if not call.future.done():
                call.future.set_exception(error)
        self._queue.clear()


def batch_size(queued: int, workers: int, mean_call_s: float) -> int:
    """Calls to send at once: a fair share of the queue, about `BATCH_TARGET_S` of work, at most `MAX_BATCH`."""
    fair = -(-queued // workers)
    timely = MAX_BATCH if mean_call_s <= 0 else int(BATCH_TARGET_S / mean_call_s)
    return max(1, min(fair, timely, MAX_BATCH))


def spec_json(config: RewardConfig, max_response_tokens: int) -> dict[str, Json]:
    """What a worker needs of the configuration; see `compose.build_spec`."""
    overlong = None
    if config.overlong is not None:
        overlong = {"max_tokens": max_response_tokens, **config.overlong.model_dump()}
    return {"parts": [part.model_dump() for part in config.parts], "overlong": overlong}

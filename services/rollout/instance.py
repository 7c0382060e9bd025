"""One rollout instance: an engine, its weights, and workers that turn leased prompts into samples.

adoption loop   DCS.wait_newer ─▶ engine verifies and swaps ─▶ probe ─▶ report
lease loop      free slots ─▶ lease prompt groups ─▶ worker.step per missing member ─▶ put ─▶ acknowledge
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ray import serve

from bus.client import BusClient
from bus.errors import BusTimeout, BusUnavailable, LeaseLost
from bus.records import Closed, Empty, GroupInfo, Lease, LeaseRequest, Row
from relax.config.faults import Point
from relax.config.sections import RolloutArgs
from relax.data.models import ensure_model
from relax.data.tokenizer import Tokenizer
from relax.engines.base import EngineError
from relax.engines.client import SglangClient
from relax.rollout.base import WorkerContext
from relax.rollout.load import load_worker
from relax.rollout.routing import teacher_of
from relax.rollout.supervise import Failure, run_with_retries
from relax.telemetry.time_split import WAIT_DATA, WAIT_WEIGHTS, WORK
from relax.telemetry.trace import GENERATE, LEASE
from relax.types import (
    NO_VERSION,
    DataItem,
    Json,
    PolicyVersion,
    Prompt,
    Purpose,
    SamplingParams,
    Trajectory,
    make_sample_id,
)
from services import names
from services.bus_link import BUS_TIMEOUTS, BusLink
from services.consume import REOPENED_POLL_S, holding, stopped_within
from services.controller.api import AdoptionReport
from services.dcs.api import PublishedVersion, Unreachable
from services.rollout.api import InstanceStatus
from services.rollout.put_batcher import PutBatcher
from services.rollout.rows import row_put
from services.rollout.weights import NodeWeights
from services.runtime import RoleReporter, call_when_up, limit_threads, run_folder_path

logger = logging.getLogger("ray.serve")

LONG_POLL_S = 2.0
WEIGHTS_POLL_S = 5.0
RELEASE_S = 5.0
"""For the leases of a drained instance to be given back."""


def sample_seed(run_seed: int, sample_id: str) -> int:
    """The draw of a sample is a function of the run's seed, the sample and the position alone."""
    digest = hashlib.blake2b(f"{run_seed}:{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _sampled_tokens(trajectories: Sequence[Trajectory]) -> int:
    return sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)


@serve.deployment(
    max_ongoing_requests=100,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=5,
    graceful_shutdown_wait_loop_s=0.2,
)
class RolloutInstance:
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, args: RolloutArgs, app: str, purposes: tuple[str, ...]
    ) -> None:
        """`purposes`: of the groups that it leases. One that only evaluates takes new weights when it is told to."""
        # Here, and not above: the manager names this class and loads no engine.
        from relax.engines.backend import build_engine
        from relax.engines.server import HttpServer
        from relax.engines.service import EngineService
        from relax.engines.transports import LocalTransport

        limit_threads(args.run)
        self.args, self.app = args, app
        self.purposes = tuple(Purpose(purpose) for purpose in purposes)
        self.evaluator = self.purposes == (Purpose.EVAL,)
        self.reporter = RoleReporter(names.EVALUATOR if self.evaluator else names.INSTANCE, app, args.run)
        info = await self.reporter.join(args.rollout.model_dump(mode="json"))
        place = await call_when_up(names.DCS, "store_place")
        try:
            self.weights = await asyncio.to_thread(NodeWeights, place, args.run, self.reporter)
        except Unreachable as error:
            self.reporter.end_run(str(error))
            await self.reporter.send()
            raise
        run_dir = run_folder_path(args.run)
        model = await asyncio.to_thread(ensure_model, args.run.model, run_dir / "model", args.run.seed)
        self.tokenizer = await asyncio.to_thread(Tokenizer.load, model)
        with self.reporter.time_split.book(WORK):
            self.engine = await asyncio.to_thread(build_engine, args.rollout.engine, args.run, model)
        self.engine.start()
        service = EngineService(self.engine)
        self.client = SglangClient(LocalTransport(service))
        self.server = HttpServer(service)
        await asyncio.to_thread(self.server.start, 30.0)
        context = WorkerContext(self.client, self.tokenizer, args.run.max_tokens, args.run.group_deadline_s)
        self.worker = load_worker(args.rollout.worker, Path.cwd())(context)
        self.bus = await BusClient.connect(
            info.bus, owner=self.reporter.owner, role=app, config=args.run.bus, deadline_s=60.0
        )
        self.link = BusLink(self.bus, self.reporter)
        self.puts = PutBatcher(self.bus)
        self.version = NO_VERSION
        self.adopted = asyncio.Event()
        self.running_samples = 0
        self._request_s, self._counted_at = 0.0, time.monotonic()
        self.freed = asyncio.Event()
        self.draining = False
        self._leases_no_more = asyncio.Event()
        self._groups: set[asyncio.Task[None]] = set()
        self.reporter.refresh = self._refresh_facts
        self.reporter.state = "waiting_weights"
        self.reporter.waiting_for = "weights"
        self.reporter.spawn(self._adopt_loop)
        self.reporter.spawn(self._lease_loop)

    async def check_health(self) -> None:
        self.reporter.check()
        if not self.engine.healthy():
            raise RuntimeError(f"engine: {self.engine.failure}")

    def _refresh_facts(self) -> None:
        engine = self.engine.status()
        self._run_more(0)
        self.reporter.facts["request_s"] = self._request_s
        self.reporter.facts.update(
            busy_s=engine.busy_s, running=engine.running, waiting=engine.waiting, swap_stall_s=engine.swap_stall_s
        )

    async def status(self) -> InstanceStatus:
        return InstanceStatus(
            app=self.app,
            version=int(self.version),
            running_samples=self.running_samples,
            url=self.server.url,
            replica_id=self.reporter.replica_id,
            draining=self.draining,
        )

    async def hold(self, published: PublishedVersion) -> None:
        """Take this version and stay at it until the next call. Raises `EngineError`."""
        if published.version != self.version:
            await self._take(published)

    async def drain(self, deadline_s: float) -> bool:
        """Lease no more and wait until nothing runs. False when the deadline came first: what is unfinished then is
        released, and others lease it."""
        self.draining = True
        self.freed.set()
        self.reporter.state = "draining"
        end = time.monotonic() + deadline_s
        if self.adopted.is_set() or self.version >= 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leases_no_more.wait(), min(deadline_s, 2 * LONG_POLL_S))
        while self._groups and (left := end - time.monotonic()) > 0:
            await asyncio.wait(self._groups, timeout=left)
        finished = not self._groups
        for group in self._groups:
            group.cancel()
        if self._groups:
            await asyncio.wait(self._groups, timeout=RELEASE_S)
        return finished

    # ------------------------------------------------------------------ weights

    async def _adopt_loop(self) -> None:
        while not (self.reporter.stopped.is_set() or self.draining or (self.evaluator and self.version >= 0)):
            newer: PublishedVersion | None = await call_when_up(
                names.DCS, "wait_newer", int(self.version), WEIGHTS_POLL_S
            )
            if newer is not None and self.evaluator:  # one that was replaced in the middle of a round
                newer = await call_when_up(names.DCS, "newest_pinned")
            if newer is not None:
                await self._adopt(newer)

    async def _adopt(self, newer: PublishedVersion) -> None:
        """A failed adoption is counted and the next version is tried (B1)."""
        try:
            await self._take(newer)
        except (EngineError, TimeoutError):
            await asyncio.sleep(0.1)  # a version that was collected meanwhile is followed by a newer one

    async def _take(self, newer: PublishedVersion) -> None:
        """All or nothing (B4). Raises `EngineError` and `TimeoutError`, counted."""
        begin, begin_wall_s = time.monotonic(), time.time()
        version = PolicyVersion(newer.version)
        try:
            deadline_s = self.args.rollout.adoption_deadline_s
            folder = await self.weights.folder(newer, deadline_s)
            left_s = deadline_s - (time.monotonic() - begin)
            report = await self.client.update_weights_from_disk(folder, version, deadline_s=left_s)
        except (EngineError, TimeoutError) as error:
            self.reporter.count("adoptions_failed")
            self.reporter.facts["adoption_error"] = str(error)
            logger.error("%s: version %d not adopted: %s", self.app, version, error)
            raise
        self.reporter.faults.passing(Point.MID_ADOPT)
        seconds = time.monotonic() - begin
        self.reporter.trace.add("adopt", begin_wall_s, time.time(), version=int(report.version))
        self.version = report.version
        self.reporter.facts.update(version=int(report.version), digest=report.digest)
        self.reporter.count("adoptions")
        self.adopted.set()
        self.freed.set()
        gap_max, gap_mean = await self._probe_gap(newer)
        adoption = AdoptionReport(
            instance=self.app,
            version=int(report.version),
            digest=report.digest,
            digest_ok=report.digest == newer.digest,
            gap_max=gap_max,
            gap_mean=gap_mean,
            seconds=seconds,
        )
        self.reporter.tell("report_adoption", adoption)

    async def _probe_gap(self, published: PublishedVersion) -> tuple[float, float]:
        """max and mean |trainer - engine| log-prob of the probe, at equal version, with a fresh KV."""
        if not published.probe:
            return 0.0, 0.0
        tokens = [np.asarray(line, np.int32) for line in published.probe["tokens"]]
        scores = await self.client.score(tokens, deadline_s=60.0)
        values = np.concatenate(
            [
                np.abs(np.asarray(theirs[1:]) - ours[1:])
                for theirs, ours in zip(published.probe["logprobs"], scores, strict=True)
            ]
        )
        return float(values.max()), float(values.mean())

    # ------------------------------------------------------------------ samples

    async def _lease_loop(self) -> None:
        with self.reporter.time_split.book(WAIT_WEIGHTS):
            await self.adopted.wait()
        if not self.draining:
            self.reporter.state = "active"
            await self._lease_until_drained()
        self._leases_no_more.set()

    async def _lease_until_drained(self) -> None:
        group_size = self.args.run.group_size
        while not self.reporter.stopped.is_set() and not self.draining:
            free = self.args.rollout.engine.slots - self.running_samples
            if free < min(group_size, self.args.rollout.engine.slots):
                self.freed.clear()
                self.reporter.waiting_for = ""
                await self.freed.wait()
                continue
            self.reporter.waiting_for = "prompts" if not self.running_samples else ""
            request = LeaseRequest(
                task="rollout",
                fields=("prompt",),
                max_items=max(1, free // group_size),
                version=self.version,
                purposes=self.purposes,
                rows_per_member=self.args.rollout.max_segments,
            )
            begin_wall_s = time.time()
            here = self.bus.caller
            try:
                with self.reporter.time_split.book(WAIT_DATA) as booking:
                    answer = await self._lease(request)
                    if isinstance(answer, Empty) and answer.reason == "version":
                        booking.kind = WAIT_WEIGHTS
            except BusTimeout:
                self.reporter.count(BUS_TIMEOUTS)
                continue
            except BusUnavailable:
                await self.link.rejoin(here)
                continue
            if isinstance(answer, Closed):
                self.reporter.state, self.reporter.waiting_for = "done", ""
                await stopped_within(self.reporter, REOPENED_POLL_S)
                continue
            if not isinstance(answer, Empty):
                self.reporter.state = "active"
                samples = ((group.group_id, k) for group in answer.groups for k in group.missing)
                self.reporter.trace.add(LEASE, begin_wall_s, time.time(), samples)
                self._start(answer)

    async def _lease(self, request: LeaseRequest) -> Lease | Empty | Closed:
        """Long poll, cut short by an adoption: what the old version may not lease, the new one may."""
        self.adopted.clear()
        poll = asyncio.ensure_future(self.bus.lease(request, wait_s=LONG_POLL_S, keep=True))
        adoption = asyncio.ensure_future(self.adopted.wait())
        try:
            await asyncio.wait({poll, adoption}, return_when=asyncio.FIRST_COMPLETED)
            if poll.done():
                return poll.result()
            return Empty("version")
        finally:
            adoption.cancel()
            poll.cancel()  # a cancelled poll hands back what it was about to get

    def _start(self, lease: Lease) -> None:
        samples = sum(len(group.missing) for group in lease.groups)
        self._run_more(samples)
        task = asyncio.create_task(self._run_lease(lease, samples))
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)

    def _run_more(self, samples: int) -> None:
        """So many more run now, or fewer; their time adds up."""
        now = time.monotonic()
        self._request_s += self.running_samples * (now - self._counted_at)
        self.running_samples, self._counted_at = self.running_samples + samples, now

    async def _run_lease(self, lease: Lease, samples: int) -> None:
        left = samples
        prompts = {row.group_id: self._prompt(row) for row in lease.rows}

        async def member(group: GroupInfo, k: int) -> None:
            nonlocal left
            try:
                await self._sample(lease.lease_id, group, self._item(group, *prompts[group.group_id], k))
            finally:
                left -= 1
                self._run_more(-1)
                self.freed.set()

        try:
            async with holding(self.bus, lease):
                self.reporter.faults.passing(Point.AFTER_LEASE)
                with self.reporter.time_split.book(WORK):
                    await asyncio.gather(*(member(group, k) for group in lease.groups for k in group.missing))
                self.reporter.faults.passing(Point.BEFORE_ACK)
        except (LeaseLost, BusTimeout, BusUnavailable):  # what it held is leased again, by whoever is ready
            self.reporter.count("leases_lost")
        except Exception as error:  # the supervisor border of this lease: the replica is told unhealthy
            if not self.reporter.stopped.is_set():
                self.reporter.fail(error)
        finally:
            self._run_more(-left)
            self.freed.set()

    async def _sample(self, lease_id: str, group: GroupInfo, item: DataItem) -> None:
        k = item.sample_index
        rollout = self.args.rollout
        begin_wall_s = time.time()
        outcome = await run_with_retries(
            self.worker,
            item,
            rollout.sample_retries,
            max_tokens=self.args.run.max_tokens,
            max_segments=rollout.max_segments,
        )
        self._trace(group, k, begin_wall_s, outcome)
        if isinstance(outcome, Failure):
            self.reporter.count("samples_failed")
            self.reporter.facts["last_sample_error"] = outcome.reason
            await self.bus.tombstone(group.group_id, k, "rollout_failed", lease_id=lease_id)
            return
        teacher = None if rollout.teachers is None else teacher_of(item.prompt, rollout.teachers)
        rows = [
            row_put(group, k, trajectory, segment=segment, segments=len(outcome), teacher=teacher)
            for segment, trajectory in enumerate(outcome)
        ]
        await self.puts.put(rows, lease_id)
        self.reporter.count("samples")
        self.reporter.count("tokens", float(_sampled_tokens(outcome)))
        if len(outcome) > 1:
            self.reporter.count("samples_split")

    def _trace(self, group: GroupInfo, k: int, begin_wall_s: float, outcome: list[Trajectory] | Failure) -> None:
        """Before the put: the reward may begin as soon as the rows are visible."""
        trace = self.reporter.trace
        if not trace.traced(group.group_id):
            return
        facts: dict[str, Json] = {}
        if isinstance(outcome, Failure):
            facts["error"] = outcome.reason
        else:
            facts["version"] = max(int(trajectory.versions.max()) for trajectory in outcome)
            facts["tokens"] = _sampled_tokens(outcome)
        trace.add(GENERATE, begin_wall_s, time.time(), [(group.group_id, k)], **facts)

    def _prompt(self, row: Row) -> tuple[Prompt, tuple[int, ...]]:
        """The prompt and its tokens, once for all samples of the group."""
        prompt = Prompt.from_json(row.json("prompt"))
        return prompt, tuple(self.tokenizer.render(prompt))

    def _item(self, group: GroupInfo, prompt: Prompt, tokens: tuple[int, ...], k: int) -> DataItem:
        run, rollout = self.args.run, self.args.rollout
        seed = sample_seed(run.seed, make_sample_id(prompt.group_id, k))
        if group.purpose == Purpose.EVAL:
            sampling = SamplingParams(
                temperature=rollout.eval.temperature,
                max_new_tokens=run.max_response_tokens,
                stop=rollout.sampling.stop,
                seed=seed,
            )
        else:
            sampling = rollout.sampling.to_params(run.max_response_tokens, seed)
        return DataItem(prompt, k, group.group_size, tokens, sampling)

    def __del__(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.close(2.0)
        weights = getattr(self, "weights", None)
        if weights is not None:
            weights.close()

"""Reward: leases samples, scores them in killable processes, puts reward fields."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
from ray import serve

from bus.client import BusClient
from bus.records import Lease, LeaseRequest, Row, RowPut
from relax.config.sections import RewardArgs
from relax.data.models import await_model
from relax.data.tokenizer import Tokenizer
from relax.rewards.base import RewardRequest, RewardResult
from relax.rewards.failures import FailureWindow, settle
from relax.rewards.pool import RewardPool
from relax.rollout.conversation import RESPONSE
from relax.telemetry.trace import REWARD
from relax.types import FinishReason, Prompt, Purpose, RewardState
from services import names
from services.consume import consume
from services.controller.api import SampleRecord, sample_lines
from services.reward.api import ScoreReply, ScoreRequest
from services.rollout.evaluation import PART_TAG
from services.runtime import START_DEADLINE_S, RoleReporter, run_folder_path

PUT_EVERY_S = 0.5
"""Rewards that are slower than this do not hold back those that are ready."""
PUT_DEADLINE_S = 60.0
REPORT_EVERY_S = 1.0
"""A call to the controller costs as much as scoring a few samples: records travel together."""
FIELDS = ("prompt", "tokens", "loss_mask", "versions", "finish_reason", "metadata")
PRODUCES = ("reward", "accuracy", "reward_parts", "reward_state")


@serve.deployment(
    max_ongoing_requests=100,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=5,
    graceful_shutdown_wait_loop_s=0.2,
)
class Reward:
    async def __init__(self, args: RewardArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        self.args = args
        self.reporter = RoleReporter(names.REWARD, names.REWARD, args.run)
        info = await self.reporter.join(args.reward.model_dump(mode="json"))
        run_dir = run_folder_path(args.run)
        model = await asyncio.to_thread(await_model, args.run.model, run_dir / "model", args.run.seed, START_DEADLINE_S)
        self.tokenizer = await asyncio.to_thread(Tokenizer.load, model)
        self.pool = RewardPool(args.reward, max_response_tokens=args.run.max_response_tokens, base=Path.cwd())
        await self.pool.start()
        self.failures = FailureWindow()
        self._unreported: list[SampleRecord] = []
        self._sample_reports = 0
        self.bus = await BusClient.connect(
            info.bus, owner=self.reporter.owner, role=names.REWARD, config=args.run.bus, deadline_s=60.0
        )
        self.reporter.refresh = self._refresh
        self.reporter.state = "running"
        self.reporter.spawn(self._loop)
        self.reporter.spawn(self._report_loop)

    async def check_health(self) -> None:
        self.reporter.check()

    def _refresh(self) -> None:
        counted = self.pool.counters
        self.reporter.counters.update(
            reward_calls=counted.calls,
            reward_failures=counted.calls - counted.by_state[RewardState.OK],
            reward_retries=counted.retries.total(),
            reward_worker_restarts=counted.worker_restarts.total(),
        )
        self.reporter.facts["failed_share"] = self.failures.share

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Score one response with the run's reward; nothing is stored."""
        prompt = Prompt("request", 0, 0, text="", label=request.label, metadata=request.metadata)
        result = await self.pool.score(RewardRequest.of(prompt, request.response, FinishReason.STOP, 0))
        return ScoreReply(
            reward=result.reward,
            accuracy=result.accuracy,
            parts=dict(result.parts),
            state=result.state.value,
            error=result.error,
        )

    async def _loop(self) -> None:
        rows = self.args.reward.rows_per_lease
        request = LeaseRequest(task="reward", fields=FIELDS, max_items=rows, produces=PRODUCES)
        await consume(self.bus, request, self.reporter, self._score_lease, self._closed)

    async def _closed(self, closed: bool) -> None:
        self._report()
        await self.reporter.told()
        self.reporter.state = "done" if closed else "running"

    async def _report_loop(self) -> None:
        while not self.reporter.stopped.is_set():
            await asyncio.sleep(REPORT_EVERY_S)
            self._report()

    def _report(self) -> None:
        samples, self._unreported = self._unreported, []
        if samples:
            self._sample_reports += 1
            self.reporter.tell("report_samples", sample_lines(samples), self.reporter.replica_id, self._sample_reports)

    async def _score_lease(self, lease: Lease) -> None:
        texts = [self._response(row) for row in lease.rows]
        of_group = {row.group_id: row.json("prompt") for row in lease.rows}
        prompt_of = {group_id: Prompt.from_json(body) for group_id, body in of_group.items()}
        prompts = [prompt_of[row.group_id] for row in lease.rows]
        requests = [
            RewardRequest.of(
                prompt,
                text,
                FinishReason(row.json("finish_reason")),
                int(row.array("loss_mask").sum()),
                row.json("metadata"),
            )
            for row, text, prompt in zip(lease.rows, texts, prompts, strict=True)
        ]
        results = await self._score_and_store(lease, requests)
        shown: dict[bytes, str] = {}  # a group's samples have one prompt
        self._unreported += [
            self._sample(row, text, prompt, result, shown)
            for row, text, prompt, result in zip(lease.rows, texts, prompts, results, strict=True)
        ]
        self._watch_failures(results)

    def _response(self, row: Row) -> str:
        """What the worker says the response is, or all sampled tokens."""
        said = row.json("metadata").get(RESPONSE)
        return str(said) if said is not None else self.tokenizer.decode(row.array("tokens")[row.array("loss_mask")])

    async def _score_and_store(self, lease: Lease, requests: list[RewardRequest]) -> list[RewardResult]:
        """The results in the order of the rows; each is in the bus at most `PUT_EVERY_S` after it came."""
        begin_s = time.time()
        tasks = [asyncio.create_task(self.pool.score(request)) for request in requests]
        row_of = dict(zip(tasks, lease.rows, strict=True))
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=PUT_EVERY_S)
                scored = [(row_of[task], task.result()) for task in tasks if task in done]
                # Before the put: the actor may begin as soon as the rewards are visible.
                self.reporter.trace.add(REWARD, begin_s, time.time(), ((row.group_id, row.k) for row, _ in scored))
                await self._store(lease, scored)
        finally:
            for task in pending:
                task.cancel()
        return [task.result() for task in tasks]

    async def _store(self, lease: Lease, results: list[tuple[Row, RewardResult]]) -> None:
        """A number becomes fields; a failure under `exclude` ends the member with its reason (B20)."""
        puts: list[RowPut] = []
        for row, result in results:
            settled = settle(result, self.args.reward.on_failure, self.args.reward.failure_reward)
            if settled.excluded is not None:
                await self.bus.tombstone(row.group_id, row.k, settled.excluded, lease_id=lease.lease_id)
                continue
            puts.append(
                RowPut(
                    row.row_id,
                    row.group_id,
                    {
                        "reward": np.float32(settled.reward),
                        "accuracy": np.float32(settled.accuracy),
                        "reward_parts": dict(result.parts),
                        "reward_state": result.state.value,
                    },
                    {f"{PART_TAG}{name}": value for name, value in result.parts.items()},
                )
            )
        if puts:
            await self.bus.put(puts, lease_id=lease.lease_id, deadline_s=PUT_DEADLINE_S, ack=True)

    def _sample(
        self, row: Row, text: str, prompt: Prompt, result: RewardResult, shown: dict[bytes, str]
    ) -> SampleRecord:
        given = row.array("tokens")[~row.array("loss_mask")]
        if (key := given.tobytes()) not in shown:
            shown[key] = self.tokenizer.decode(given, skip_special=False)
        purpose = str(row.tags.get("purpose") or Purpose.TRAIN.value)
        return SampleRecord(
            row_id=row.row_id,
            purpose=purpose,
            version=int(row.array("versions").max()),
            prompt=shown[key],
            response=text,
            label=prompt.label,
            reward=result.reward,
            accuracy=result.accuracy,
            parts=dict(result.parts),
            reward_state=result.state.value,
            finish_reason=str(row.json("finish_reason")),
        )

    def _watch_failures(self, results: list[RewardResult]) -> None:
        for result in results:
            self.failures.record(result.state)
            if result.state is not RewardState.OK:
                self.reporter.count(f"failed_{result.state.value}")
                self.reporter.facts["last_failure"] = result.error
        if self.failures.should_stop(self.args.reward.max_failure_share):
            self.reporter.end_run(
                f"{100 * self.failures.share:.0f} % of the last {self.failures.calls} reward calls failed "
                f"(reward.max_failure_share {self.args.reward.max_failure_share}); the last: "
                f"{self.reporter.facts.get('last_failure')}"
            )

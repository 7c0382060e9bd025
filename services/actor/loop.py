"""The training loop: lease complete groups, train, publish, commit.

    step v:  lease groups ─┬─ micro-batches → forward/backward (streamed, or the whole step: relax/training/step.py)
                           └─ leases stay held until the step has committed
             optimizer step → publish v+1 (DCS commits) → commit in the bus (leases end, version v+1)

A crash anywhere before the commit discards the gradients; the leases expire and the groups are
delivered again. Runs in a thread of its own; calls to bus and services go through the replica's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import ray
import torch

from bus.client import BusClient
from bus.records import Closed, Empty, Lease, LeaseRequest
from relax.config.sections import ActorArgs
from relax.control.admission import hold_below
from relax.control.judge import constant_reward_warning
from relax.dump.recorder import RecordingBackend, RecordingCritic
from relax.telemetry.time_split import WAIT_DATA, WORK
from relax.training.base import NonFiniteUpdate
from relax.training.batching import TrainRow
from relax.training.own_trainer import build_step
from relax.training.step import StepOutcome
from relax.types import PolicyVersion, Purpose, RelaxError
from relax.weights.store import WeightStore
from services import names
from services.actor.batch import StepSamples, actor_fields, train_rows
from services.actor.dumping import StepDumper
from services.actor.trace import StepTrace
from services.consume import COMMIT_ATTEMPTS, LONG_POLL_S, commit_step
from services.dcs.api import PublishedVersion, PublishTicket
from services.runtime import RoleReporter, call

logger = logging.getLogger("ray.serve")
T = TypeVar("T")

CRITIC = "critic"
"""Folder of its state in a checkpoint."""


class TrainingStopped(Exception):
    """The run was stopped while the step waited for data."""


class NothingTrained(RelaxError):
    """The data ended before a single step (B14)."""


@dataclass(slots=True)
class OpenStep:
    """A step that has not committed: what it holds, and those who record it. `fields`: of its rows."""

    fields: tuple[str, ...]
    trace: StepTrace
    dumper: StepDumper
    samples: StepSamples = field(default_factory=StepSamples)
    leases: list[Lease] = field(default_factory=list)

    @property
    def groups(self) -> int:
        return sum(len(lease.groups) for lease in self.leases)

    def add(self, lease: Lease, version: PolicyVersion) -> None:
        """`version`: of the policy that is being trained."""
        self.leases.append(lease)
        self.trace.begin(lease)
        self.samples.add(lease, int(version))
        self.dumper.add(lease)


class TrainingLoop:
    def __init__(
        self,
        args: ActorArgs,
        backend: RecordingBackend,
        critic: RecordingCritic | None,
        dumper: StepDumper,
        bus: BusClient,
        reporter: RoleReporter,
        loop: asyncio.AbstractEventLoop,
        probe: npt.NDArray[np.int64],
        export_folder: Path,
    ):
        self.trainer = build_step(args.run, args.actor, backend, critic, Path.cwd())
        self.critic = critic
        self.args, self.backend, self.bus, self.reporter, self.loop = args, backend, bus, reporter, loop
        self.dumper, self.export_folder = dumper, export_folder
        self.step = 0
        self.version = PolicyVersion(0)
        self.skipped_in_a_row = 0
        self.lags: Counter[int] = Counter()
        self._store: WeightStore | None = None
        self._bucket_bytes = 0
        self._report: Any = None
        self._fields = actor_fields(args.actor.algorithm)
        self._probe = probe

    # ------------------------------------------------------------------ the other threads

    def wait(self, coroutine: Coroutine[Any, Any, T], deadline_s: float = 60.0) -> T:
        """Run a coroutine on the replica's loop and wait for it here."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(deadline_s)

    # ------------------------------------------------------------------ the training thread

    def run(self) -> None:
        torch.set_num_threads(self.args.run.threads)
        run = self.args.run
        with self.reporter.time_split.book(WORK):
            self._start()
        self.reporter.state = "running"
        try:
            while self.step < run.steps:
                with self.reporter.time_split.book(WORK):
                    trained = self._train_step()
                if not trained:
                    break
        except TrainingStopped:
            self.reporter.state = "stopped"
            return
        finally:
            self.dumper.discard()
        if self.step == 0:
            raise NothingTrained("the prompt source ended before one step was trained: nothing was learnt")
        with self.reporter.time_split.book(WORK):
            self._checkpoint()
            if self.args.actor.export:
                self.backend.export(self.export_folder)
        self._finish_report()
        self.reporter.state, self.reporter.waiting_for = "done", ""

    def _start(self) -> None:
        """Publish version 0, or go on from the newest checkpoint."""
        checkpoint = self.wait(call(names.DCS, "latest_checkpoint"))
        published: PublishedVersion | None = self.wait(call(names.DCS, "wait_newer", -1, 0.0))
        if checkpoint is not None:
            self.backend.load(Path(checkpoint.folder))
            if self.critic is not None:
                self.critic.load(Path(checkpoint.folder) / CRITIC)
            self.step = checkpoint.step
            self.version = PolicyVersion(max(checkpoint.version, published.version if published else 0))
        elif published is not None and published.version > 0:
            raise RuntimeError(
                f"the actor restarted at version {published.version} without a checkpoint: its state is lost"
            )
        if published is None:
            self._publish(self.version)
        self.wait(self.bus.set_version(self.version, self.step))

    def _train_step(self) -> bool:
        """One committed step. False when the data has ended and nothing is left to train."""
        begin = time.monotonic()
        fields = (*self._fields, *self.dumper.begin(self.step + 1))
        opened = OpenStep(fields, StepTrace(self.reporter.trace, self.step + 1), self.dumper)

        def supply(groups: int) -> Iterator[list[TrainRow]]:
            return self._supply(groups, opened)

        try:
            outcome = self.trainer.train(supply, self.step, self.version)
        except NonFiniteUpdate as error:
            self._skip(opened.leases, error)
            return True
        if outcome is None:
            return False
        self.skipped_in_a_row = 0
        if outcome.skipped:
            self.reporter.count("updates_skipped", outcome.skipped)
        version = PolicyVersion(self.version + 1)
        opened.trace.trained()
        publish_begin = time.monotonic()
        self._publish(version)
        publish_s = time.monotonic() - publish_begin
        self.step, self.version = self.step + 1, version
        committed = self.wait(
            commit_step(
                self.bus,
                [lease.lease_id for lease in opened.leases],
                version=version,
                step=self.step,
                on_repeat=lambda: self.reporter.count("commits_repeated"),
            ),
            COMMIT_ATTEMPTS * self.args.run.bus.rpc_timeout_s + 5.0,
        )
        opened.trace.published(int(version))
        self.lags.update(opened.samples.lags)
        self._send_record(opened.samples, outcome, time.monotonic() - begin, publish_s)
        self.dumper.finish(outcome, PolicyVersion(version - 1))
        due = self.args.actor.checkpoint_every and self.step % self.args.actor.checkpoint_every == 0
        if (due or committed.retained_over_budget) and self.step < self.args.run.steps:
            self._checkpoint()
        return True

    def _supply(self, groups: int, opened: OpenStep) -> Iterator[list[TrainRow]]:
        """The rows of `groups` groups as they become ready. Ends early only when the data has ended."""
        run, actor = self.args.run, self.args.actor
        per_lease = actor.groups_per_lease or max(1, run.groups_per_step // 4)
        remaining = groups
        while remaining > 0:
            lease = self._lease(opened.fields, run.groups_per_step - opened.groups, min(per_lease, remaining))
            if lease is None:
                return
            opened.add(lease, self.version)
            remaining -= len(lease.groups)
            yield train_rows(lease, actor.algorithm)  # the step computes between two of these
            self.reporter.count("rows", len(lease.rows))

    def _lease(self, fields: tuple[str, ...], slots_left: int, max_groups: int) -> Lease | None:
        run = self.args.run
        request = LeaseRequest(
            task="actor",
            fields=fields,
            max_items=max_groups,
            purposes=(Purpose.TRAIN,),
            version=self.version,
            max_token_lag=run.token_lag_bound,
            slots_left=slots_left,
            groups_per_step=run.groups_per_step,
            hold_below=hold_below(self.version, run.max_staleness, run.overdue_policy),
        )
        self.reporter.waiting_for = f"{slots_left} complete groups"
        with self.reporter.time_split.book(WAIT_DATA):
            while True:
                if self.reporter.stopped.is_set():
                    raise TrainingStopped
                answer = self.wait(self.bus.lease(request, wait_s=LONG_POLL_S, keep=True))
                if isinstance(answer, Closed):
                    return None
                if not isinstance(answer, Empty):
                    self.reporter.waiting_for = ""
                    return answer

    def _skip(self, leases: list[Lease], error: NonFiniteUpdate) -> None:
        """The update did not happen (B45): its groups are dropped with that reason, and counted."""
        self.reporter.count("updates_skipped")
        self.skipped_in_a_row += 1
        logger.error("step %d skipped: %s", self.step + 1, error)
        for lease in leases:
            self.wait(self.bus.release(lease.lease_id, "non_finite_update"))
        groups = [group.group_id for lease in leases for group in lease.groups]
        self.wait(call(names.ROLLOUT, "drop_groups", groups, "non_finite_update"))
        if self.skipped_in_a_row > self.args.actor.max_skipped_steps:
            self.reporter.end_run(f"{self.skipped_in_a_row} updates in a row were not finite; the last: {error}")

    # ------------------------------------------------------------------ weights, checkpoints, reports

    def _publish(self, version: PolicyVersion) -> None:
        if self._store is None:
            ticket: PublishTicket = self.wait(call(names.DCS, "begin_publish"))
            self._refuse_other_node(ticket)
            self._store = WeightStore(Path(ticket.root), keep=1)
            self._bucket_bytes = ticket.bucket_bytes
        dtype = getattr(torch, self.args.actor.publish_dtype)
        tensors = [(name, tensor.to(dtype)) for name, tensor in self.backend.state_tensors()]
        staged = self._store.stage(version, self.step, tensors, self._bucket_bytes)
        tokens = torch.from_numpy(self._probe)
        logprobs, _ = self.backend.logprobs(
            tokens, torch.ones_like(tokens, dtype=torch.bool), torch.ones(len(tokens), dtype=torch.float32)
        )
        probe = {"tokens": self._probe.tolist(), "logprobs": logprobs.tolist()}
        self.wait(call(names.DCS, "commit_publish", staged.folder.name, probe))
        self.reporter.facts["version"] = int(version)
        self.reporter.count("publications")

    def _refuse_other_node(self, ticket: PublishTicket) -> None:
        here = ray.get_runtime_context().get_node_id()
        if ticket.node_id != here:
            raise RelaxError(
                f"the actor is on node {here[:8]} and dcs on node {ticket.node_id[:8]}, and weights are staged in "
                "memory: place both on one node (ray_actor_options.resources of their deployments)"
            )

    def _checkpoint(self) -> None:
        """A failed save is counted and told; the run goes on from the last good state (B47)."""
        folder, begin_s = None, time.time()
        try:
            folder = self.wait(call(names.DCS, "begin_checkpoint", self.step))
            self.backend.save(Path(folder))
            if self.critic is not None:
                (Path(folder) / CRITIC).mkdir()
                self.critic.save(Path(folder) / CRITIC)
            meta = {"version": int(self.version), "lags": {str(lag): n for lag, n in self.lags.items()}}
            self.wait(call(names.DCS, "commit_checkpoint", self.step, folder, meta), deadline_s=300.0)
            self.reporter.trace.add("checkpoint", begin_s, time.time(), step=self.step)
            self.wait(self.bus.gc(self.step))  # trained rows are kept until the checkpoint that covers them
        except (RelaxError, OSError) as error:
            self.reporter.count("checkpoints_failed")
            self.reporter.facts["checkpoint_error"] = str(error)
            logger.error("checkpoint at step %d failed: %s", self.step, error)
            if folder is not None:
                self.wait(call(names.DCS, "abort_checkpoint", folder, str(error)))

    def _send_record(self, samples: StepSamples, outcome: StepOutcome, step_s: float, publish_s: float) -> None:
        warning = constant_reward_warning(self.step, samples.rewards)
        if warning is not None:
            self.reporter.count("constant_reward_steps")
            self.reporter.facts["warning"] = warning
            logger.warning("%s", warning)
        result = outcome.result
        record = {
            "step": float(self.step),
            "version": float(self.version),
            **samples.record(),
            **result.stats,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "step_s": step_s,
            "train_compute_s": result.compute_s,
            "trainer_utilisation": result.compute_s / step_s,
            "publish_s": publish_s,
            "updates": float(outcome.updates),
            "wait_data_s": max(0.0, step_s - result.compute_s - publish_s),
            "tokens_per_s": samples.response_tokens / step_s,
        }
        self.reporter.facts["lag_histogram"] = {str(lag): count for lag, count in sorted(self.lags.items())}
        self.reporter.count("steps")
        self._finish_report()
        self._report = asyncio.run_coroutine_threadsafe(call(names.CONTROLLER, "report_step", record), self.loop)

    def _finish_report(self) -> None:
        if self._report is not None:
            self._report.result(60.0)
            self._report = None

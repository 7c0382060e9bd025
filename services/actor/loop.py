"""The training loop: lease complete groups, train, publish, commit.

    step v:  lease groups ─┬─ micro-batches → forward/backward (streamed, or the whole step: relax/training/step.py)
                           └─ leases stay held until the step has committed
             optimizer step → snapshot of the state, with the groups of the step → publish v+1 (DCS commits)
             → commit in the bus (leases end, version v+1)

A crash before the snapshot discards the step: its leases end and its groups are delivered again. After the snapshot
the step is taken: who comes up publishes and commits what was not. Where the newest state is older than what was
trained, the steps in between are trained again, in a new lineage (relax/control/lineage.py). When the bus is lost the
open step is discarded too; a step that was taken and not heard of is told to the next bus, before anything is leased
there. Runs in a thread of its own; calls to bus and services go through the replica's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from bus.client import BusClient
from bus.errors import BusTimeout, BusUnavailable, LeaseLost
from bus.records import AckResult, Caller, Closed, Empty, Lease, LeaseRequest, TrainedStep
from relax.config.faults import Point
from relax.config.sections import ActorArgs
from relax.control.admission import hold_below
from relax.control.judge import constant_reward_warning
from relax.control.lineage import Published, next_version, version_to_publish
from relax.dump.recorder import RecordingBackend, RecordingCritic
from relax.telemetry.time_split import WAIT_DATA, WORK
from relax.training.base import NonFiniteUpdate
from relax.training.batching import TrainRow
from relax.training.own_trainer import build_step
from relax.training.step import StepOutcome
from relax.types import Json, PolicyVersion, Purpose, RelaxError
from relax.weights.space import NoSpace
from relax.weights.store import WeightStore
from services import names
from services.actor.batch import StepSamples, actor_fields, in_order, train_rows
from services.actor.committing import commit_step, hold_on
from services.actor.dumping import StepDumper
from services.actor.keeping import SAVE_DEADLINE_S, StateKeeper
from services.actor.trace import StepTrace
from services.bus_link import BUS_TIMEOUTS, BusLink
from services.consume import LONG_POLL_S
from services.dcs.api import PublishedVersion, PublishTicket, SavedState
from services.rollout.api import ActorState
from services.runtime import START_DEADLINE_S, RoleReporter, ServiceUnavailable, call, call_when_up

logger = logging.getLogger("ray.serve")
T = TypeVar("T")

REJOIN_DEADLINE_S = 3600.0
"""Each attempt has a deadline of its own; who has no bus at all has nothing better to do."""

GO_ON_DEADLINE_S = 300.0
"""For the manager to come up, and to make the bus anew where what is to be trained again has lost its rows."""
LEAVE_DEADLINE_S = 10.0
"""For the ledger to hear of the last step of a run that is stopped."""
RECOMMIT_WAIT_S = 10.0
RECORD_POLL_S = 0.2
HISTORY_STEPS = 8
"""Steps beyond max_staleness that are kept to be told to a new bus: the ledger cannot be further behind, for then
nothing more would have been admitted."""


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
        self.published = Published(PolicyVersion(-1), 0)
        self.link = BusLink(bus, reporter, self._recommit)
        self.history: deque[TrainedStep] = deque(maxlen=args.run.max_staleness + HISTORY_STEPS)
        """The last steps that were taken, published or not yet."""
        self.skipped_in_a_row = 0
        self.lags: Counter[int] = Counter()
        self._last_record: dict[str, float] = {}
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
                here = self.bus.caller
                try:
                    with self.reporter.time_split.book(WORK):
                        trained = self._train_step()
                except BusUnavailable:
                    self._rejoin(here)
                    continue
                except LeaseLost as error:  # before the step was taken: its groups come again
                    logger.warning("step %d is discarded: %s", self.step + 1, error)
                    continue
                if not trained:
                    break
        except TrainingStopped:
            with self.reporter.time_split.book(WORK):
                self._leave()
            self.reporter.state = "stopped"
            return
        except NoSpace:  # of the memory for weights: the step was taken, and is saved on disk
            with self.reporter.time_split.book(WORK):
                self._leave()
            raise
        finally:
            self.dumper.discard()
        if self.step == 0:
            raise NothingTrained("the prompt source ended before one step was trained: nothing was learnt")
        with self.reporter.time_split.book(WORK):
            self.keeper.save(self.step, self._meta(self._last_record))
            self.keeper.finish()
            if self.args.actor.export:
                self.backend.export(self.export_folder)
        self.wait(self.reporter.told(), REJOIN_DEADLINE_S)
        self.wait(self._until_recorded(), REJOIN_DEADLINE_S)
        self.reporter.state, self.reporter.waiting_for = "done", ""

    def _leave(self) -> None:
        """The run ends before its last step: a checkpoint of the last that was taken, and the ledger knows of it."""
        if self.step == 0:
            return
        self.keeper.finish()
        if self.keeper.saved != self.step:
            self.keeper.save(self.step, self._meta(self._last_record))
            self.keeper.finish()
        try:
            self.wait(asyncio.wait_for(self._until_recorded(though_stopped=True), LEAVE_DEADLINE_S), REJOIN_DEADLINE_S)
        except (TimeoutError, ServiceUnavailable) as error:  # who goes on from here tells the ledger then
            logger.warning("step %d is not in the ledger: %s", self.step, error or type(error).__name__)

    def _start(self) -> None:
        """Publish version 0, or go on from the newest state."""
        ticket: PublishTicket = self.wait(call_when_up(names.DCS, "begin_publish"), START_DEADLINE_S)
        self._refuse_other_node(ticket)
        self._store, self._bucket_bytes = WeightStore(Path(ticket.root), keep=1), ticket.bucket_bytes
        self.keeper = StateKeeper(
            self.backend,
            self.critic,
            Path(ticket.snapshots),
            self.link,
            self.reporter,
            self.loop,
            reserve_bytes=ticket.reserve_bytes,
        )
        saved: SavedState | None = self.wait(
            call_when_up(names.DCS, "newest_state", deadline_s=SAVE_DEADLINE_S), SAVE_DEADLINE_S
        )
        newest: PublishedVersion | None = self.wait(call_when_up(names.DCS, "wait_newer", -1, 0.0), START_DEADLINE_S)
        if saved is not None:
            self._load(saved)
        published = Published(PolicyVersion(newest.version), newest.step) if newest is not None else None
        if published is not None:
            self.published = published
        self._go_on(published, ticket.newest)
        self.wait(self.link.until_done(self._recommit), REJOIN_DEADLINE_S)

    def _go_on(self, published: Published | None, newest: Published | None) -> None:
        """Say where we are; what was trained later is trained again. `newest`: version ever published, None before one.

        Publishes the present policy when no engine has one that the open groups may be made with.
        """
        needed = PolicyVersion(0)
        if newest is not None:
            state = ActorState(self.step, int(newest.version), published.step if published is not None else self.step)
            calling = call_when_up(names.ROLLOUT, "go_on_from", state, deadline_s=GO_ON_DEADLINE_S)
            needed = PolicyVersion(self.wait(calling, GO_ON_DEADLINE_S))
        version = version_to_publish(self.step, published, newest, needed)
        if version is not None:
            self._publish(version)

    def _load(self, saved: SavedState) -> None:
        self.keeper.load(saved)
        self.step = saved.step
        self.lags.update({int(lag): count for lag, count in saved.meta["lags"].items()})
        self.history.extend(TrainedStep(*step) for step in saved.meta["history"])
        self._last_record = saved.meta["record"]
        self._send(self._last_record)  # it may have died before it had told
        self.reporter.count("snapshots_restored" if saved.in_memory else "checkpoints_restored")
        logger.warning("the actor goes on from its state after step %d in %s", self.step, saved.folder)

    def _rejoin(self, lost: Caller) -> None:
        self.wait(self.link.rejoin(lost), REJOIN_DEADLINE_S)
        self._go_on_in_another_bus()

    def _go_on_in_another_bus(self) -> None:
        """Rows that were to be trained again went with the old one, and are made anew by the policy as it is now."""
        if self.step < self.published.step:
            self._go_on(self.published, self.published)
            self.wait(self.link.until_done(self._tell_version), REJOIN_DEADLINE_S)

    async def _until_recorded(self, though_stopped: bool = False) -> None:
        """Until the ledger has the last step: a bus that is lost before that has to be told of it."""
        self.reporter.waiting_for = "the ledger to have the last step"
        while though_stopped or not self.reporter.stopped.is_set():
            here = self.bus.caller
            try:
                await self.bus.ping()
                if await call_when_up(names.ROLLOUT, "trained_through") >= self.step:
                    return
                await asyncio.sleep(RECORD_POLL_S)
            except BusTimeout:
                self.reporter.count(BUS_TIMEOUTS)
            except BusUnavailable:
                await self.link.rejoin(here)

    async def _recommit(self) -> None:
        """To a bus that knows nothing of us: the steps that the ledger may not have heard of, and where we are."""
        while not self.reporter.stopped.is_set():
            try:
                told = await self.bus.recommit(list(self.history), wait_s=RECOMMIT_WAIT_S)
                await self._tell_version()
            except BusTimeout:  # the manager is not there yet
                self.reporter.count(BUS_TIMEOUTS)
                continue
            self.reporter.count("steps_recommitted", told)
            return

    async def _tell_version(self) -> None:
        await self.bus.set_version(self.published.version, self.published.step, self.step)

    @property
    def version(self) -> PolicyVersion:
        """Of the policy that is being trained: the version it has, or would have if every step had published."""
        return self.published.at(self.step)

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
        self.step += 1
        version = next_version(self.step, self.published)
        newest = self.published.version if version is None else version
        self.history.append(TrainedStep(self.step, int(newest), opened.samples.of_groups()))
        self.lags.update(opened.samples.lags)
        record = self._last_record = self._record(opened.samples, outcome, newest, time.monotonic() - begin)
        if self.args.actor.snapshot_every and self.step % self.args.actor.snapshot_every == 0:
            self.keeper.take(self.step, self._meta(record))
        self.reporter.faults.passing(Point.AFTER_SNAPSHOT)
        opened.trace.trained()
        if version is not None:
            publish_begin = time.monotonic()
            self._publish(version)
            record["publish_s"] = time.monotonic() - publish_begin
        else:
            self.reporter.count("steps_trained_again")
        self.reporter.faults.passing(Point.BEFORE_COMMIT)
        committed = self._commit([lease.lease_id for lease in opened.leases])
        opened.trace.published(int(newest))
        self._warn_of_constant_rewards(opened.samples)
        self.reporter.count("steps")
        self._send(_timed(record, opened.samples, time.monotonic() - begin))
        self.dumper.finish(outcome, PolicyVersion(self.version - 1))
        due = self.args.actor.checkpoint_every and self.step % self.args.actor.checkpoint_every == 0
        if (due or committed.retained_over_budget) and self.step < self.args.run.steps:
            self.keeper.save(self.step, self._meta(record))
        return True

    def _meta(self, record: dict[str, float]) -> dict[str, Json]:
        """What a state carries beside its tensors: enough to finish the step if its actor does not."""
        return {
            "lags": {str(lag): count for lag, count in self.lags.items()},
            "history": [list(step) for step in self.history],
            "record": record,
        }

    def _commit(self, lease_ids: list[str]) -> AckResult:
        """Of the step that was just taken."""
        here = self.bus.caller
        commit = commit_step(self.bus, self.link, self.reporter, self.history[-1], lease_ids)
        try:
            committed = self.wait(commit, REJOIN_DEADLINE_S)
        except BusTimeout:
            raise TrainingStopped from None
        if self.bus.caller != here:
            self._go_on_in_another_bus()
        return committed

    def _supply(self, groups: int, opened: OpenStep) -> Iterator[list[TrainRow]]:
        """The rows of `groups` groups as they become ready. Ends early only when the data has ended."""
        run, actor = self.args.run, self.args.actor
        per_lease = actor.groups_per_lease or max(1, run.groups_per_step // 4)
        remaining = groups
        together: list[tuple[tuple[int, int, int], TrainRow]] = []
        while remaining > 0:
            lease = self._lease(opened.fields, run.groups_per_step - opened.groups, min(per_lease, remaining))
            if lease is None:
                break
            opened.add(lease, self.version)
            self.reporter.faults.passing(Point.AFTER_LEASE)
            remaining -= len(lease.groups)
            rows = train_rows(lease, actor.algorithm)
            if run.deterministic:
                together += in_order(lease, rows)
            else:
                yield rows  # the step computes between two of these
            self.reporter.count("rows", len(lease.rows))
        self.wait(hold_on(self.bus, self.reporter, [lease.lease_id for lease in opened.leases]), REJOIN_DEADLINE_S)
        if together:
            yield [row for _, row in sorted(together, key=itemgetter(0))]

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
                try:
                    answer = self.wait(self.bus.lease(request, wait_s=LONG_POLL_S, keep=True))
                except BusTimeout:
                    self.reporter.count(BUS_TIMEOUTS)
                    continue
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
        dtype = getattr(torch, self.args.actor.publish_dtype)
        tensors = [(name, tensor.to(dtype)) for name, tensor in self.backend.state_tensors()]
        tokens = torch.from_numpy(self._probe)
        logprobs, _ = self.backend.logprobs(
            tokens, torch.ones_like(tokens, dtype=torch.bool), torch.ones(len(tokens), dtype=torch.float32)
        )
        probe = {"tokens": self._probe.tolist(), "logprobs": logprobs.tolist()}
        while True:
            staged = self._store.stage(version, self.step, tensors, self._bucket_bytes)
            self.reporter.faults.passing(Point.MID_PUBLISH)
            try:
                self.wait(call(names.DCS, "commit_publish", staged.folder.name, probe))
                break
            except (RayActorError, RayServeException, ServiceUnavailable) as error:
                logger.warning("version %d: no answer from dcs: %s", version, error)
            self.reporter.count("publications_repeated")
            newest = self.wait(call_when_up(names.DCS, "wait_newer", -1, 0.0), START_DEADLINE_S)
            if newest is not None and newest.version >= version:  # the answer was lost, not the weights
                break
        self.published = Published(version, self.step)
        self.reporter.facts["version"] = int(version)
        self.reporter.count("publications")

    def _refuse_other_node(self, ticket: PublishTicket) -> None:
        here = ray.get_runtime_context().get_node_id()
        if ticket.node_id != here:
            raise RelaxError(
                f"the actor is on node {here[:8]} and dcs on node {ticket.node_id[:8]}, and weights are staged in "
                "memory: place both on one node (ray_actor_options.resources of their deployments)"
            )

    def _warn_of_constant_rewards(self, samples: StepSamples) -> None:
        warning = constant_reward_warning(self.step, samples.rewards)
        if warning is not None:
            self.reporter.count("constant_reward_steps")
            self.reporter.facts["warning"] = warning
            logger.warning("%s", warning)

    def _record(
        self, samples: StepSamples, outcome: StepOutcome, version: PolicyVersion, step_s: float
    ) -> dict[str, float]:
        """Of the present step, before it is published."""
        result = outcome.result
        record = {
            "step": float(self.step),
            "version": float(version),
            **samples.record(),
            **result.stats,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "train_compute_s": result.compute_s,
            "publish_s": 0.0,
            "updates": float(outcome.updates),
        }
        return _timed(record, samples, step_s)

    def _send(self, record: dict[str, float]) -> None:
        self.reporter.facts["lag_histogram"] = {str(lag): count for lag, count in sorted(self.lags.items())}
        self.loop.call_soon_threadsafe(self.reporter.tell, "report_step", record)


def _timed(record: dict[str, float], samples: StepSamples, step_s: float) -> dict[str, float]:
    """With what follows from the time of the whole step."""
    compute_s = record["train_compute_s"]
    return {
        **record,
        "step_s": step_s,
        "trainer_utilisation": compute_s / step_s,
        "wait_data_s": max(0.0, step_s - compute_s - record["publish_s"]),
        "tokens_per_s": samples.response_tokens / step_s,
    }

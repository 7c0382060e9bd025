"""The roles of a simulated run that is struck by faults.

The manager is the real one but for its prompts, rewards and references are the real loop of a consumer; the instance
and the actor take the steps of theirs in the same order, with time in place of models. They reach the bus by the real
client.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bus.client import BusClient
from bus.errors import BusTimeout, BusUnavailable, LeaseLost
from bus.records import PROMPTS, Closed, Empty, GroupInfo, Lease, LeaseRequest, RowPut, TrainedStep
from relax.config.faults import Point
from relax.config.sections import RolloutArgs
from relax.control.admission import hold_below
from relax.control.lineage import Published, next_version, version_to_publish
from relax.faults import FaultPoints
from relax.telemetry.time_split import TimeSplit
from relax.types import NO_VERSION, FinishReason, PolicyVersion, Prompt, Purpose, SamplingParams, Trajectory
from services.actor.committing import commit_step, hold_on
from services.actor.loop import HISTORY_STEPS, TrainingLoop
from services.bus_link import BUS_TIMEOUTS, BusLink
from services.consume import LONG_POLL_S, consume, holding
from services.rollout.api import ActorState
from services.rollout.groups import GroupKeeper, RenewBus
from services.rollout.ledger import Ledger
from services.rollout.put_batcher import PutBatcher
from services.rollout.rows import row_put
from services.runtime import RoleReporter
from services.simulation.hub import Hub
from services.simulation.virtual import PROCESS, Process

PROMPT_TOKENS, RESPONSE_TOKENS = 2, 3
SAMPLE_S, SCORE_S, TRAIN_S, UPDATE_S, PUBLISH_S, ADOPT_S = 0.3, 0.05, 0.1, 0.1, 0.05, 0.1
"""Mean seconds of a sample and of a scored lease; seconds of a lease that is trained, of an update, of a publication
and of an adoption."""
CHECKPOINT_EVERY = 4
POLL_S = 0.2


class Died(asyncio.CancelledError):
    """The process was killed at a point that it passed; like its other tasks, this one just ends."""


class Trap(FaultPoints):
    """The points of a simulated process: `sprung` hears of each passage, and says whether the process dies there."""

    def __init__(self, process: Process, sprung: Callable[[Process, Point], bool]) -> None:
        self._process, self._sprung = process, sprung

    def passing(self, point: Point) -> None:
        if self._process.alive and self._sprung(self._process, point):
            raise Died


class SimulatedReporter(RoleReporter):
    """Counts, and reports to nobody."""

    def __init__(self, role: str, process: Process, faults: FaultPoints) -> None:
        self.role, self.instance, self.owner = role, process.name, f"{process.name}-0"
        self.state, self.waiting_for = "starting", ""
        self.counters, self.facts = {}, {}
        self.time_split = TimeSplit()
        self.error = self.fatal = None
        self.stopped = asyncio.Event()
        self.faults = faults


class Prompts:
    """A finite source of numbered prompts, in their order."""

    name = "simulated"
    skipped = 0

    def __init__(self, size: int, epochs: int) -> None:
        self._size, self._total, self._next = size, size * epochs, 0

    def next(self) -> Prompt | None:
        if self._next >= self._total:
            return None
        epoch, index = divmod(self._next, self._size)
        self._next += 1
        return Prompt(self.name, epoch, index, text=str(self._next))

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]

    def __len__(self) -> int:
        return self._size


@dataclass(slots=True)
class SimulatedState:
    """What a snapshot holds; `learnt`: the groups of each step, in the place of weights."""

    step: int = 0
    history: tuple[TrainedStep, ...] = ()
    learnt: tuple[tuple[str, ...], ...] = ()


class Weights:
    """The newest published version, and its step. It outlives who published it."""

    def __init__(self) -> None:
        self.version = int(NO_VERSION)
        self.step = 0
        self.broken: str | None = None
        self._changed = asyncio.Event()

    def publish(self, version: int, step: int) -> None:
        if version <= self.version:
            self.broken = f"version {version} was published after {self.version}"
        self.version, self.step = max(version, self.version), step
        self._changed.set()
        self._changed = asyncio.Event()

    async def newer(self, than: int) -> int:
        while self.version <= than:
            await self._changed.wait()
        return self.version


@dataclass(slots=True)
class Stage:
    """What the roles share: the bus, and what outlives a process."""

    args: RolloutArgs
    hub: Hub
    ledger_path: Path
    prompts: Callable[[], Prompts]
    reporter: Callable[[str, Process], SimulatedReporter]
    rng: random.Random
    weights: Weights = field(default_factory=Weights)
    snapshot: SimulatedState | None = None
    checkpoint: SimulatedState | None = None
    renew_bus: RenewBus | None = None
    keeper: GroupKeeper | None = None
    """Of the manager that lives."""
    manager: Process | None = None
    manager_done: bool = False
    actor_done: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


def score_of(row_id: str) -> float:
    """0 or 1, a function of the sample."""
    return float(hashlib.blake2b(row_id.encode(), digest_size=1).digest()[0] & 1)


# ---------------------------------------------------------------------- manager


async def manage(stage: Stage, process: Process) -> None:
    stage.manager_done = False
    reporter = stage.reporter("rollout", process)
    ledger = Ledger(stage.ledger_path)
    try:
        bus = await stage.hub.connect(process, reporter.owner)
        assert stage.renew_bus is not None
        keeper = GroupKeeper(stage.args, ledger, stage.prompts(), bus, reporter, stage.renew_bus)
        stage.keeper, stage.manager = keeper, process
        await _until_over(stage, reporter, keeper.event_loop(), keeper.drop_loop(), _admit(stage, keeper))
    finally:
        stage.keeper = None
        ledger.close()


async def _admit(stage: Stage, keeper: GroupKeeper) -> None:
    await keeper.take_up()
    await asyncio.gather(keeper.admit_loop(), _close(stage, keeper))


async def _close(stage: Stage, keeper: GroupKeeper) -> None:
    while True:
        await keeper.finished.wait()
        await keeper.close(PROMPTS)
        stage.manager_done = keeper.finished.is_set()
        await keeper.reopened.wait()
        stage.manager_done = False


async def _until_over(stage: Stage, reporter: RoleReporter, *loops: Awaitable[None]) -> None:
    """All loops of a role, until the run is over; a fault of one is a fault of the role."""
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    over = asyncio.ensure_future(stage.over.wait())
    open_tasks: set[asyncio.Future[Any]] = {*tasks, over}
    while not over.done():
        done, open_tasks = await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    reporter.stopped.set()


# ---------------------------------------------------------------------- reward and reference


async def score(stage: Stage, process: Process, role: str) -> None:
    """`reward` or `ref`: rows in, fields out."""
    reporter = stage.reporter(role, process)
    bus = await stage.hub.connect(process, reporter.owner)
    produces = {"reward": ("reward", "accuracy"), "ref": ("ref_logprobs",)}[role]
    request = LeaseRequest(role, ("tokens", "versions"), max_items=8, produces=produces)

    async def handle(lease: Lease) -> None:
        await asyncio.sleep(stage.rng.expovariate(1 / SCORE_S))
        puts = [RowPut(row.row_id, row.group_id, _scored(role, row.row_id)) for row in lease.rows]
        await bus.put(puts, lease_id=lease.lease_id, deadline_s=60.0, ack=True)

    await _until_over(stage, reporter, consume(bus, request, reporter, handle))


def _scored(role: str, row_id: str) -> dict[str, Any]:
    if role == "ref":
        return {"ref_logprobs": np.zeros(PROMPT_TOKENS + RESPONSE_TOKENS, np.float32)}
    value = np.float32(score_of(row_id))
    return {"reward": value, "accuracy": value}


# ---------------------------------------------------------------------- instance


async def generate(stage: Stage, process: Process) -> None:
    reporter = stage.reporter("instance", process)
    bus = await stage.hub.connect(process, reporter.owner)
    instance = _Instance(stage, reporter, bus)
    await _until_over(stage, reporter, instance.adopt(), instance.lease())


class _Instance:
    def __init__(self, stage: Stage, reporter: RoleReporter, bus: BusClient) -> None:
        self._stage, self._reporter, self._bus = stage, reporter, bus
        self._link, self._puts = BusLink(bus, reporter), PutBatcher(bus)
        self._version = int(NO_VERSION)
        self._adopted = asyncio.Event()
        self._room = asyncio.Semaphore(4)
        self._groups: set[asyncio.Task[None]] = set()

    async def adopt(self) -> None:
        while True:
            version = await self._stage.weights.newer(self._version)
            await asyncio.sleep(ADOPT_S)
            self._reporter.faults.passing(Point.MID_ADOPT)
            self._version = version
            self._adopted.set()

    async def lease(self) -> None:
        await self._adopted.wait()
        while True:
            await self._room.acquire()
            lease = await self._next()
            task = asyncio.create_task(self._run(lease))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)

    async def _next(self) -> Lease:
        while True:
            here = self._bus.caller
            request = LeaseRequest("rollout", ("prompt",), version=PolicyVersion(self._version))
            try:
                answer = await self._bus.lease(request, wait_s=LONG_POLL_S, keep=True)
            except BusTimeout:
                self._reporter.count(BUS_TIMEOUTS)
            except BusUnavailable:
                await self._link.rejoin(here)
            else:
                if isinstance(answer, Lease):
                    return answer
                if isinstance(answer, Closed):  # until the bus is another one, whose prompts may come again
                    await asyncio.sleep(POLL_S)

    async def _run(self, lease: Lease) -> None:
        try:
            async with holding(self._bus, lease):
                self._reporter.faults.passing(Point.AFTER_LEASE)
                await asyncio.gather(
                    *(self._sample(lease.lease_id, group, k) for group in lease.groups for k in group.missing)
                )
                self._reporter.faults.passing(Point.BEFORE_ACK)
        except (LeaseLost, BusTimeout, BusUnavailable):
            self._reporter.count("leases_lost")
        finally:
            self._room.release()

    async def _sample(self, lease_id: str, group: GroupInfo, k: int) -> None:
        version = self._version
        await asyncio.sleep(self._stage.rng.expovariate(1 / SAMPLE_S))
        await self._puts.put([row_put(group, k, _trajectory(version))], lease_id)
        self._reporter.count("samples")


def _trajectory(version: int) -> Trajectory:
    tokens = PROMPT_TOKENS + RESPONSE_TOKENS
    sampled = np.arange(tokens) >= PROMPT_TOKENS
    return Trajectory(
        tokens=np.ones(tokens, np.int32),
        loss_mask=sampled,
        rollout_logprobs=np.zeros(tokens, np.float32),
        versions=np.where(sampled, version, int(NO_VERSION)).astype(np.int32),
        sampling=SamplingParams(),
        finish_reason=FinishReason.STOP,
    )


# ---------------------------------------------------------------------- actor


async def train(stage: Stage, process: Process) -> None:
    stage.actor_done = False
    reporter = stage.reporter("actor", process)
    bus = await stage.hub.connect(process, reporter.owner)
    await _until_over(stage, reporter, SimulatedActor(stage, reporter, bus).live())


async def ask_manager(stage: Stage, state: ActorState) -> PolicyVersion:
    """`go_on_from` of the manager that lives; asked anew when it dies meanwhile."""
    while True:
        keeper, process = stage.keeper, stage.manager
        if keeper is None or process is None or not process.alive:
            await asyncio.sleep(POLL_S)
            continue
        context = contextvars.copy_context()
        context.run(PROCESS.set, process)
        asked = asyncio.get_running_loop().create_task(keeper.go_on_from(state), context=context)
        await asyncio.wait({asked})
        if not asked.cancelled() and process.alive:
            return asked.result()


class SimulatedActor(TrainingLoop):
    """Takes the steps of `TrainingLoop` on the simulated clock; what it tells a new bus is the loop's own."""

    def __init__(self, stage: Stage, reporter: RoleReporter, bus: BusClient) -> None:
        run = stage.args.run
        self.stage, self.run_config, self.reporter, self.bus = stage, run, reporter, bus
        self.step = 0
        self.published = Published(NO_VERSION, 0)
        self.link = BusLink(bus, reporter, self._recommit)
        self.history = deque[TrainedStep](maxlen=run.max_staleness + HISTORY_STEPS)
        self.learnt: tuple[tuple[str, ...], ...] = ()

    async def live(self) -> None:
        await self._come_up()
        while True:
            here = self.bus.caller
            try:
                if not await self._one_step():
                    break
            except BusUnavailable:
                await self.link.rejoin(here)
                await self._in_another_bus()
            except LeaseLost:
                self.reporter.count("steps_discarded")
        await self._recorded()
        self.stage.actor_done = True

    async def _come_up(self) -> None:
        stage, weights = self.stage, self.stage.weights
        saved = stage.snapshot or stage.checkpoint
        if saved is not None:
            self.step, self.learnt = saved.step, saved.learnt
            self.history.extend(saved.history)
        published = None
        if weights.version >= 0:
            published = self.published = Published(PolicyVersion(weights.version), weights.step)
        await self._agree(published)
        await self.link.until_done(self._recommit)

    async def _agree(self, published: Published | None) -> None:
        """As `TrainingLoop._go_on`."""
        needed = PolicyVersion(0)
        if published is not None:
            needed = await ask_manager(self.stage, ActorState(self.step, int(published.version), published.step))
        version = version_to_publish(self.step, published, published, needed)
        if version is not None:
            await self._publish_version(version)

    async def _in_another_bus(self) -> None:
        if self.step < self.published.step:
            await self._agree(self.published)
            await self.link.until_done(self._tell_version)

    async def _one_step(self) -> bool:
        """False when the data has ended and nothing is left to train."""
        leases: list[Lease] = []
        samples: Counter[str] = Counter()
        groups: list[str] = []
        while len(groups) < self.run_config.groups_per_step:
            lease = await self._next_groups(self.run_config.groups_per_step - len(groups))
            if lease is None:
                break
            self.reporter.faults.passing(Point.AFTER_LEASE)
            self._check_lag(lease)
            leases.append(lease)
            groups += [group.group_id for group in lease.groups]
            samples.update(row.group_id for row in lease.rows)
            await asyncio.sleep(TRAIN_S)
        if not groups:
            return False
        await hold_on(self.bus, self.reporter, [lease.lease_id for lease in leases])
        await asyncio.sleep(UPDATE_S)
        self._take(groups, samples)
        self.reporter.faults.passing(Point.AFTER_SNAPSHOT)
        version = next_version(self.step, self.published)
        if version is not None:
            await self._publish_version(version)
        self.reporter.faults.passing(Point.BEFORE_COMMIT)
        here = self.bus.caller
        await commit_step(self.bus, self.link, self.reporter, self.history[-1], [lease.lease_id for lease in leases])
        if self.bus.caller != here:
            await self._in_another_bus()
        self.reporter.count("steps")
        if self.step % CHECKPOINT_EVERY == 0:
            self.stage.checkpoint = self._state()
            await self.link.until_done(lambda: self.bus.gc(self.step))
        return True

    def _check_lag(self, lease: Lease) -> None:
        """Rows of a later policy than the trained one are as wrong as those of too old a one."""
        for row in lease.rows:
            lag = int(self.version) - int(row.tags["oldest_version"] or 0)
            if not 0 <= lag <= self.run_config.token_lag_bound:
                self.stage.weights.broken = f"row {row.row_id} lags {lag} versions behind step {self.step}"

    def _take(self, groups: list[str], samples: Counter[str]) -> None:
        """The step is in the weights, and in the snapshot."""
        self.step += 1
        newest = next_version(self.step, self.published) or self.published.version
        self.history.append(TrainedStep(self.step, int(newest), dict(samples)))
        self.learnt = (*self.learnt, tuple(groups))
        self.stage.snapshot = self._state()

    def _state(self) -> SimulatedState:
        return SimulatedState(self.step, tuple(self.history), self.learnt)

    async def _publish_version(self, version: PolicyVersion) -> None:
        self.reporter.faults.passing(Point.MID_PUBLISH)
        await asyncio.sleep(PUBLISH_S)
        self.stage.weights.publish(int(version), self.step)
        self.published = Published(version, self.step)

    async def _next_groups(self, slots_left: int) -> Lease | None:
        run = self.run_config
        request = LeaseRequest(
            task="actor",
            fields=("tokens", "versions", "reward", *(("ref_logprobs",) if run.use_ref else ())),
            max_items=max(1, run.groups_per_step // 2),
            purposes=(Purpose.TRAIN,),
            version=self.version,
            max_token_lag=run.token_lag_bound,
            slots_left=slots_left,
            groups_per_step=run.groups_per_step,
            hold_below=hold_below(self.version, run.max_staleness, run.overdue_policy),
        )
        while True:
            try:
                answer = await self.bus.lease(request, wait_s=LONG_POLL_S, keep=True)
            except BusTimeout:
                self.reporter.count(BUS_TIMEOUTS)
                continue
            if isinstance(answer, Closed):
                return None
            if not isinstance(answer, Empty):
                return answer

    async def _recorded(self) -> None:
        """Until the ledger has the last step: a bus that is lost before that has to be told of it."""
        while True:
            here = self.bus.caller
            try:
                await self.bus.ping()
                keeper = self.stage.keeper
                if keeper is not None and keeper.ledger.trained_through >= self.step:
                    return
                await asyncio.sleep(POLL_S)
            except BusTimeout:
                self.reporter.count(BUS_TIMEOUTS)
            except BusUnavailable:
                await self.link.rejoin(here)

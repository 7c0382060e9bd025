"""A run on the simulated clock whose processes are killed, stopped and cut off; and whether anything came of it.

Real are ledger, admission, judge, the manager's and the consumers' loops, the bus's client, engine and index. What
holds at every call, and at the end:

    produced = trained + dropped + queued                   after each call of the bus (B16)
    groups in flight <= (S + 1) x B                         after each call of the bus, replays apart (B15)
    every prompt of the source has exactly one end          in the ledger (B12)
    what the weights have learnt is what the ledger says    each group once, none missing
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from bus.index import Index
from bus.lifecycle import limits_for
from relax.config.faults import Point
from relax.config.sections import RolloutArgs, RunFile
from relax.control.chaos import Fault, How, Planned, plan
from relax.simulation.clock import Clock
from relax.types import RelaxError
from services.rollout.ledger import Ledger, TerminalState
from services.simulation.hub import Hub, Network
from services.simulation.survivors import (
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    Prompts,
    SimulatedReporter,
    Stage,
    Trap,
    generate,
    manage,
    score,
    train,
)
from services.simulation.virtual import PROCESS, Deadlock, Process, VirtualLoop

POLL_S = 0.05
PATIENCE_S = 120.0
"""A role that has not come up after a fault for so long does not come up any more."""
LONGEST_STOP_S = 60.0
STATES_LOST = 0.3
"""Share of the actors' deaths that take the snapshot with them: the newest checkpoint is what is left."""
SETTLED_S = 2_000.0
"""Without a group that ended for so long, the run hangs."""


class Recovery(Protocol):
    """How long after a loss the next incarnation begins, in seconds."""

    def delay_s(self, role: str, losses: int) -> float: ...


class AtOnce:
    """Detected and replaced in about the time that Serve takes."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def delay_s(self, role: str, losses: int) -> float:
        return self._rng.uniform(0.5, 6.0)


def simulated_pool(use_ref: bool, instances: int) -> list[Fault]:
    """Every role at any time and at each of its points, and the stops that outlast a lease."""
    points = {
        "actor": (Point.AFTER_LEASE, Point.AFTER_SNAPSHOT, Point.MID_PUBLISH, Point.BEFORE_COMMIT),
        "rollout": (Point.MID_PUT, Point.BEFORE_ACK, Point.EPOCH_BORDER),
        "instance": (Point.AFTER_LEASE, Point.MID_PUT, Point.BEFORE_ACK, Point.MID_ADOPT),
        "reward": (Point.AFTER_LEASE, Point.MID_PUT, Point.BEFORE_ACK),
        "ref": (Point.AFTER_LEASE, Point.MID_PUT, Point.BEFORE_ACK),
    }
    if not use_ref:
        del points["ref"]
    pool = [Fault(How.KILL, role) for role in (*points, "bus", "bus")]
    pool += [Fault(How.KILL, role, point) for role, at in points.items() for point in at]
    return pool


@dataclass(slots=True)
class Report:
    """What a run came to. `consumed`: group -> its end; `learnt`: the groups of each step, from the weights."""

    kills: int = 0
    by_fault: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    lost_calls: int = 0
    lost_answers: int = 0
    simulated_s: float = 0.0
    states_lost: int = 0
    """Actors that died together with the memory that held their snapshot."""
    renewals: int = 0
    """Buses that were made anew because the rows of an older state were gone."""
    steps: int = 0
    consumed: dict[str, str] = field(default_factory=dict)
    learnt: list[tuple[str, ...]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`groups`: of the finite source, over `epochs`."""

    args: RolloutArgs
    groups: int
    epochs: int = 3
    instances: int = 2
    network: Network = field(default_factory=Network)
    seed: int = 1

    @classmethod
    def for_kills(cls, args: RolloutArgs, kills: int, seed: int, *, lost_share: float, instances: int) -> Scenario:
        """Long enough that about two faults fall on a step."""
        epochs = 3
        size = max(4 * args.run.groups_per_step, kills * args.run.groups_per_step // (2 * epochs))
        return cls(args, size * epochs, epochs, instances, Network(lost_share=lost_share), seed)


def survive(scenario: Scenario, kills: int, recovery: Recovery | None = None) -> Report:
    """The run with so many kills; the unbroken one has none."""
    clock = Clock()
    loop = VirtualLoop(clock)
    with tempfile.TemporaryDirectory(prefix="relax-survival-") as folder:
        survival = _Survival(scenario, Path(folder), clock, recovery or AtOnce(scenario.seed))
        try:
            loop.run_until_complete(survival.run(kills))
        except (Deadlock, RelaxError) as error:
            survival.report.broken.append(str(error))
        finally:
            _end_all(loop)
            loop.close()
        survival.close()
    return survival.report


LOST_SHARE = 0.02


def survive_file(file: RunFile, kills: int, seed: int) -> tuple[Report, Report, list[str]]:
    """The unbroken run of a file's settings, the struck one, and what is broken. Its source is finite, in the place of
    the file's own."""
    run = file.run.model_copy(update={"steps": 1_000_000, "fault_points": ()})
    args = RolloutArgs(run=run, rollout=file.rollout)
    scenario = Scenario.for_kills(args, kills, seed, lost_share=LOST_SHARE, instances=file.rollout.instances)
    unbroken = survive(replace(scenario, network=Network()), 0)
    struck = survive(scenario, kills)
    broken = [f"the unbroken run: {words}" for words in unbroken.broken] + compare(struck, unbroken)
    if struck.kills < kills and not broken:
        broken.append(f"{struck.kills} of {kills} faults were injected")
    return unbroken, struck, broken


def report_json(unbroken: Report, struck: Report, broken: list[str]) -> dict[str, Any]:
    ends = Counter(end.split(" ")[0] for end in struck.consumed.values())
    return {
        "ok": not broken,
        "broken": broken,
        "kills": struck.kills,
        "faults": dict(sorted(struck.by_fault.items())),
        "restarts": dict(sorted(struck.restarts.items())),
        "states_lost": struck.states_lost,
        "bus_renewals": struck.renewals,
        "lost_calls": struck.lost_calls,
        "lost_answers": struck.lost_answers,
        "simulated_s": round(struck.simulated_s, 1),
        "steps": struck.steps,
        "consumed": len(struck.consumed),
        "consumed_unbroken": len(unbroken.consumed),
        **{state.value: ends[state.value] for state in TerminalState},
    }


def compare(struck: Report, unbroken: Report) -> list[str]:
    """What the struck run has lost or doubled against the unbroken one (B12)."""
    broken = list(struck.broken)
    missing = sorted(unbroken.consumed.keys() - struck.consumed.keys())
    more = sorted(struck.consumed.keys() - unbroken.consumed.keys())
    if missing or more:
        broken.append(f"consumed ids differ: {len(missing)} missing {missing[:3]}, {len(more)} more {more[:3]}")
    other = sorted(
        group
        for group, end in unbroken.consumed.items()
        if struck.consumed.get(group, end) != end and not struck.consumed[group].startswith(TerminalState.DROPPED)
    )
    if other:
        broken.append(f"{len(other)} groups ended otherwise than in the unbroken run: {other[:3]}")
    return broken


def _end_all(loop: VirtualLoop) -> None:
    """Nothing of the run stays behind."""
    while tasks := asyncio.all_tasks(loop):  # one that ends may say farewell in another
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


class _Survival:
    def __init__(self, scenario: Scenario, folder: Path, clock: Clock, recovery: Recovery) -> None:
        self.scenario, self.clock, self.recovery = scenario, clock, recovery
        self.report = Report()
        self._folder = folder
        self._rng = random.Random(scenario.seed)
        self._alive: dict[str, tuple[Process, SimulatedReporter | None]] = {}
        self._armed: tuple[Process, Point] | None = None
        self._ended = 0
        self._renewals: set[asyncio.Task[None]] = set()
        self.stage: Stage | None = None

    # ------------------------------------------------------------------ the run

    async def run(self, kills: int) -> None:
        run = self.scenario.args.run
        limits = limits_for(run.bus, PROMPT_TOKENS + RESPONSE_TOKENS)
        hub = Hub(limits, run.bus, self.scenario.network, self.scenario.seed, self._look)
        per_epoch = self.scenario.groups // self.scenario.epochs
        self.stage = stage = Stage(
            self.scenario.args,
            hub,
            self._folder / "ledger.sqlite",
            lambda: Prompts(per_epoch, self.scenario.epochs),
            self._reporter,
            self._rng,
        )
        stage.renew_bus = self._renew_bus
        hub.start()
        roles = [self._keep(name, body) for name, body in self._cast(stage)]
        works = [asyncio.create_task(work) for work in (*roles, self._strike_all(kills, hub))]
        await self._watch(stage, works)
        self.report.lost_calls, self.report.lost_answers = hub.lost_calls, hub.lost_answers
        self.report.simulated_s = self.clock.now

    def _cast(self, stage: Stage) -> list[tuple[str, Callable[[Process], Coroutine[Any, Any, None]]]]:
        cast: list[tuple[str, Callable[[Process], Coroutine[Any, Any, None]]]] = [
            ("rollout", lambda process: manage(stage, process)),
            ("reward", lambda process: score(stage, process, "reward")),
            ("actor", lambda process: train(stage, process)),
        ]
        if self.scenario.args.run.use_ref:
            cast.append(("ref", lambda process: score(stage, process, "ref")))
        names = [f"rollout-{number}" for number in range(self.scenario.instances)]
        return [*cast, *((name, lambda process: generate(stage, process)) for name in names)]

    async def _keep(self, name: str, body: Callable[[Process], Coroutine[Any, Any, None]]) -> None:
        """A role over its incarnations."""
        losses = 0
        while True:
            process = Process(name)
            context = contextvars.copy_context()
            context.run(PROCESS.set, process)
            self._alive[name] = (process, None)
            life = asyncio.get_running_loop().create_task(body(process), context=context)
            await asyncio.wait({life})
            if process.alive:
                life.result()
                return
            losses += 1
            self.report.restarts[name] += 1
            await asyncio.sleep(self.recovery.delay_s(name, losses))

    def _reporter(self, role: str, process: Process) -> SimulatedReporter:
        reporter = SimulatedReporter(role, process, Trap(process, self._sprung))
        self._alive[process.name] = (process, reporter)
        return reporter

    async def _watch(self, stage: Stage, works: list[asyncio.Task[None]]) -> None:
        """Until all faults are over and actor and manager are done, or something is broken."""
        moved_at, ended = self.clock.now, -1
        *_, strikes = works
        while not self.report.broken and not (strikes.done() and stage.manager_done and stage.actor_done):
            await asyncio.sleep(POLL_S)
            for work in works:
                if work.done():
                    work.result()  # a role that ended by its own fault
            if self._ended != ended:
                moved_at, ended = self.clock.now, self._ended
            if self.clock.now - moved_at > SETTLED_S:
                self.report.broken.append(f"nothing moves any more after {ended} groups, at {self.clock.now:.0f} s")
        stage.over.set()

    # ------------------------------------------------------------------ what is looked at after each call of the bus

    def _look(self, index: Index) -> None:
        account = index.account()
        if not account.balanced:
            self._break(f"samples do not add up at {self.clock.now:.3f} s: {account}")
        keeper = self.stage.keeper if self.stage else None
        if keeper is not None:
            admission = keeper.admission
            self._ended = admission.trained + admission.filtered + admission.dropped.total()
            groups = [index.state.groups[group_id] for group_id in index.state.open_train]
            flying = sum(group.replay is None for group in groups)
            if flying > admission.limits.max_outstanding:
                self._break(f"{flying} groups in flight, {admission.limits.max_outstanding} are allowed")
            if self.stage is not None and self.stage.weights.broken is not None:
                self._break(self.stage.weights.broken)
            if keeper.reporter.fatal is not None:
                self._break(f"the manager ended the run: {keeper.reporter.fatal}")

    def _break(self, words: str) -> None:
        if not self.report.broken:
            self.report.broken.append(words)

    # ------------------------------------------------------------------ faults

    async def _strike_all(self, kills: int, hub: Hub) -> None:
        pool = simulated_pool(self.scenario.args.run.use_ref, self.scenario.instances)
        for planned in plan(pool, kills, self.scenario.seed, self.scenario.groups):
            while self._ended < planned.step:
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(self._rng.expovariate(10.0))
            if planned.fault.role == "bus":
                await self._lose_bus(hub)
            else:
                await self._strike(planned)
            self.report.kills += 1
            self.report.by_fault[str(planned.fault)] += 1
            if self._rng.random() < 0.2:
                self._stop_somebody()

    async def _lose_bus(self, hub: Hub) -> None:
        """Whoever made it makes it anew."""
        if hub.engine is None:  # it is being made anew already
            return
        hub.die()
        await asyncio.sleep(self.recovery.delay_s("bus", self.report.restarts["bus"]))
        self.report.restarts["bus"] += 1
        hub.start()

    async def _renew_bus(self, epoch: str, reason: str) -> None:
        """Asked for by the manager; in no process, as the controller is another one."""
        stage = self.stage
        assert stage is not None
        if stage.hub.engine is not None and stage.hub.engine.epoch == epoch:
            self.report.renewals += 1
            renewal = asyncio.get_running_loop().create_task(self._lose_bus(stage.hub), context=contextvars.Context())
            self._renewals.add(renewal)
            renewal.add_done_callback(self._renewals.discard)

    async def _strike(self, planned: Planned) -> None:
        """Kill a process of the role, once it has got on, at the fault's point if it passes there soon."""
        process = await self._victim(planned)
        assert self.stage is not None
        if planned.fault.role == "actor" and not self.stage.actor_done and self._rng.random() < STATES_LOST:
            process.die()
            self.stage.snapshot = None
            self.report.states_lost += 1
            return
        point = planned.fault.point
        if point is None:
            process.die()
            return
        self._armed = (process, point)
        deadline = self.clock.now + PATIENCE_S / 4
        while process.alive and self.clock.now < deadline:
            await asyncio.sleep(POLL_S)
        self._armed = None
        if process.alive:  # the last epoch has begun, or everything is scored
            process.die()

    async def _victim(self, planned: Planned) -> Process:
        """Preferably one that has got on since it came up; towards the end there may be nothing to get on with."""
        begin = self.clock.now
        prefix = "rollout-" if planned.fault.role == "instance" else planned.fault.role
        while self.clock.now - begin < PATIENCE_S:
            patient = self.clock.now - begin < PATIENCE_S / 4
            ready = [
                process
                for name, (process, reporter) in sorted(self._alive.items())
                if (name.startswith(prefix) if prefix.endswith("-") else name == prefix)
                and process.alive
                and reporter is not None
                and (reporter.counters or not patient)
            ]
            if ready:
                return ready[int(planned.pick * len(ready))]
            await asyncio.sleep(POLL_S)
        raise RelaxError(f"{planned.fault.role} did not come up for {PATIENCE_S:g} s")

    def _stop_somebody(self) -> None:
        """SIGSTOP for longer than a lease lives: what it held goes to others, and it comes back late."""
        name = self._rng.choice(sorted(self._alive))
        process = self._alive[name][0]
        lease_s = min(self.scenario.args.run.bus.lease_ttl_s, LONGEST_STOP_S)
        process.paused_until = self.clock.now + self._rng.uniform(0.5, 1.5) * lease_s
        self.report.by_fault[f"stop:{name.split('-')[0]}"] += 1

    def _sprung(self, process: Process, point: Point) -> bool:
        if self._armed is None or self._armed != (process, point):
            return False
        process.die()
        return True

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """What ledger and weights say."""
        report, stage = self.report, self.stage
        if stage is None or not stage.ledger_path.exists():
            return
        with Ledger(stage.ledger_path, read_only=True) as ledger:
            terminals, counts = ledger.terminals(), ledger.counts()
            numbered = ledger.next_seq
        report.consumed = {
            terminal.group_id: " ".join(filter(None, (terminal.state, terminal.reason))) for terminal in terminals
        }
        state = stage.snapshot or stage.checkpoint
        learnt = state.learnt if state else ()
        report.learnt, report.steps = list(learnt), len(learnt)
        if report.broken:
            return
        if counts.open or numbered != self.scenario.groups or counts.refused:
            report.broken.append(
                f"of {self.scenario.groups} groups {numbered} were admitted, {counts.open} have no end, "
                f"{counts.refused} came to two"
            )
        doubled = [group for group, times in Counter(g for step in learnt for g in step).items() if times > 1]
        if doubled:
            report.broken.append(f"{len(doubled)} groups were learnt twice: {doubled[:3]}")
        recorded: dict[str, int | None] = {t.group_id: t.step for t in terminals if t.state is TerminalState.TRAINED}
        taken = {group: number for number, step in enumerate(learnt, 1) for group in step}
        if recorded != taken:
            differing = sorted(g for g in recorded.keys() | taken.keys() if recorded.get(g) != taken.get(g))
            report.broken.append(f"ledger and weights differ in {len(differing)} groups: {differing[:3]}")

"""Which fault strikes which role of a run, and when; what came of each; whether the run withstood them. Pure.

A fault is named `how:role`, or `how:role:point` where it waits for a named point of the code:
`kill:actor`, `hang:instance`, `kill:dcs:dcs_mid_publish`. With `@STEP` it is scheduled; the others are the pool from
which a seed draws.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from relax.config.base import nearest
from relax.config.faults import ROLES_AT, FaultAction, FaultPoint, Point
from relax.telemetry.summary import RESTARTED, UNSAVED
from relax.types import RelaxError


class ChaosError(RelaxError):
    """Faults that cannot be injected; says which and why."""


class How(enum.StrEnum):
    KILL = "kill"
    """SIGKILL."""
    HANG = "hang"
    """SIGSTOP, until whoever watches replaces it."""
    SLOW = "slow"
    """SIGSTOP and SIGCONT in short turns, for some seconds."""
    CRASH = "crash"
    """A reward function takes its interpreter down: SIGSEGV to a process that scores."""
    FULL = "full"
    """The disk is full during a save."""


LETHAL = (How.KILL, How.HANG)
"""After these the process has to be another one."""

REPLICAS = ("actor", "ref", "reward", "dcs", "rollout", "instance")
"""Roles with heartbeats; `rollout` is the manager, `instance` one of its rollout instances."""
HOSTS = ("controller", "bus", "store", "proxy", "serve")
"""Controller; engine and storage of the bus; Serve's HTTP proxy and Serve's controller."""
BUS = ("bus", "store")
"""Made anew together."""
WORKER = "reward_worker"
SAVE = "save"

_ACTION = {How.KILL: FaultAction.KILL, How.HANG: FaultAction.HANG}


@dataclass(frozen=True, slots=True)
class Fault:
    how: How
    role: str
    point: Point | None = None

    def __str__(self) -> str:
        return ":".join([self.how, self.role, *([self.point] if self.point else [])])

    @property
    def lethal(self) -> bool:
        return self.how in LETHAL

    @property
    def fault_point(self) -> FaultPoint | None:
        """What the process has to be told; None where a signal from outside does it."""
        if self.how is How.FULL:
            return FaultPoint(point=Point.MID_SAVE, role="dcs", action=FaultAction.NO_SPACE, at=None)
        if self.point is None:
            return None
        return FaultPoint(point=self.point, role=self.role, action=_ACTION[self.how], at=None)


def known_faults() -> dict[str, Fault]:
    """All that can be named."""
    plain = [Fault(how, role) for how in (How.KILL, How.HANG) for role in (*REPLICAS, *HOSTS)]
    plain += [Fault(How.SLOW, role) for role in REPLICAS]
    plain += [Fault(How.CRASH, WORKER), Fault(How.FULL, SAVE)]
    at_points = [
        Fault(how, role, point)
        for point, roles in ROLES_AT.items()
        for role in roles
        if role in REPLICAS
        for how in LETHAL
    ]
    return {str(fault): fault for fault in (*plain, *at_points)}


def default_pool(roles: Iterable[str]) -> list[Fault]:
    """What `relax chaos` draws from: kills of everything, the points that hurt most, one of each milder kind."""
    chosen = [Fault(How.KILL, role) for role in (*REPLICAS, *HOSTS)]
    chosen += [
        Fault(How.KILL, "instance", Point.MID_PUT),
        Fault(How.KILL, "reward", Point.BEFORE_ACK),
        Fault(How.KILL, "rollout", Point.BEFORE_ACK),
        Fault(How.KILL, "actor", Point.AFTER_SNAPSHOT),
        Fault(How.KILL, "actor", Point.BEFORE_COMMIT),
        Fault(How.KILL, "dcs", Point.DCS_MID_PUBLISH),
        Fault(How.HANG, "instance"),
        Fault(How.SLOW, "ref"),
        Fault(How.SLOW, "instance"),
        Fault(How.CRASH, WORKER),
        Fault(How.FULL, SAVE),
    ]
    return possible(chosen, roles)


def possible(faults: Iterable[Fault], roles: Iterable[str]) -> list[Fault]:
    """Those whose role the run has."""
    there = {*roles, *HOSTS, SAVE}
    there |= {WORKER} if "reward" in there else set()
    return [fault for fault in faults if fault.role in there]


@dataclass(frozen=True, slots=True)
class Planned:
    """Due when the run has trained `step` steps. `pick` in [0, 1): which of several like processes."""

    number: int
    fault: Fault
    step: int
    pick: float


def parse_faults(text: str, roles: Sequence[str]) -> tuple[list[Fault], list[tuple[Fault, int]]]:
    """`kill:actor,hang:ref@12` -> the pool, and the scheduled ones with their steps. Raises `ChaosError`."""
    known, pool, scheduled = known_faults(), list[Fault](), list[tuple[Fault, int]]()
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, at, step = word.partition("@")
        if name not in known:
            raise ChaosError(f"unknown fault '{name}'{nearest(name, known)}")
        fault = known[name]
        if not possible([fault], roles):
            raise ChaosError(f"fault '{name}': this run has no {fault.role}")
        if not at:
            pool.append(fault)
        elif step.isdecimal() and int(step) >= 1:
            scheduled.append((fault, int(step)))
        else:
            raise ChaosError(f"fault '{word}': after @ comes a step from 1 on")
    if not pool and not scheduled:
        raise ChaosError("no fault is named: for example --faults kill:actor,hang:instance@12")
    return pool, scheduled


END_S = 60.0
"""A run that finishes so soon after a fault did without its victim: that it was not back yet is no fault of the run."""
FIRST_SHARE, LAST_SHARE = 0.03, 0.85
"""Of the steps between which the drawn faults lie: services come up before, and recover after."""


def plan(
    pool: Sequence[Fault], kills: int, seed: int, steps: int, scheduled: Sequence[tuple[Fault, int]] = ()
) -> list[Planned]:
    """`kills` faults from the pool, evenly over the run, and the scheduled ones; in the order in which they are due.

    Each fault of the pool comes up before one comes twice, and no role twice in a row where there is another.
    Raises `ChaosError` when one is scheduled after the last step.
    """
    late = [f"{fault}@{step}" for fault, step in scheduled if step > steps]
    if late:
        raise ChaosError(f"scheduled after the last step, {steps}: {', '.join(late)}")
    rng = random.Random(seed)
    drawn: list[tuple[Fault, int]] = list(scheduled)
    bag: list[Fault] = []
    last: str | None = None
    first, span = FIRST_SHARE * steps, (LAST_SHARE - FIRST_SHARE) * steps
    for number in range(kills if pool else 0):
        if not bag:
            bag = rng.sample(list(pool), len(pool))
        fault = next((fault for fault in bag if fault.role != last), bag[0])
        bag.remove(fault)
        last = fault.role
        drawn.append((fault, max(1, round(first + span * (number + rng.random()) / kills))))
    drawn.sort(key=lambda item: item[1])
    return [Planned(number, fault, step, rng.random()) for number, (fault, step) in enumerate(drawn)]


# ---------------------------------------------------------------------- the run as it is seen


UP = ("running", "active", "done", "waiting")
"""Words of a replica that does its work."""
LOST = ("lost", "failed")


@dataclass(frozen=True, slots=True)
class Seen:
    """One process of the run. `progress`: anything that changes when it gets on."""

    role: str
    pid: int
    state: str
    progress: object


@dataclass(frozen=True, slots=True)
class View:
    """`seen` by name: replicas by their application, the hosts by their role."""

    step: int
    running: bool
    seen: Mapping[str, Seen]


@dataclass(slots=True)
class Strike:
    """One fault and what came of it; times in seconds since the run was deployed."""

    planned: Planned
    victim: str
    pid: int
    step: int
    armed_s: float | None = None
    at_s: float | None = None
    """None: armed, and its point not reached."""
    detected_s: float | None = None
    recovered_s: float | None = None
    progressed_s: float | None = None
    baseline: object = None
    """Progress when it had recovered."""

    @property
    def over(self) -> bool:
        return self.progressed_s is not None

    @property
    def fault(self) -> Fault:
        return self.planned.fault


AT_ONCE = 2
"""Roles that may be down at the same time."""


class Conductor:
    """Says what is due, and follows what came of it. The caller injects, and tells the time."""

    def __init__(self, planned: Sequence[Planned], at_once: int = AT_ONCE) -> None:
        self.pending = list(planned)
        self.strikes: list[Strike] = []
        self.restarts: Counter[str] = Counter()
        """Processes that were seen to be replaced, by name."""
        self.now_s = 0.0
        """Of the last look."""
        self._pids: dict[str, int] = {}
        self._at_once = at_once

    def due(self, view: View) -> tuple[Planned, str] | None:
        """The next fault and the name of its victim. Never a role that has not got on since its last fault."""
        open_strikes = [strike for strike in self.strikes if not strike.over]
        if not view.running or len(open_strikes) >= self._at_once:
            return None
        busy = {strike.victim for strike in open_strikes}
        for planned in self.pending:
            if planned.step > view.step:
                return None
            ready = sorted(
                name
                for name, seen in view.seen.items()
                if seen.role == owner_of(planned.fault) and seen.state in UP and name not in busy
            )
            if ready:
                return planned, ready[int(planned.pick * len(ready))]
        return None

    def struck(self, planned: Planned, victim: str, view: View, now_s: float, *, armed: bool = False) -> Strike:
        """It was injected; `armed`: it will be, when the victim passes the point."""
        self.pending.remove(planned)
        strike = Strike(planned, victim, view.seen[victim].pid, view.step)
        strike.armed_s, strike.at_s = (now_s, None) if armed else (None, now_s)
        self.strikes.append(strike)
        return strike

    def fired(self, strike: Strike, now_s: float) -> None:
        """The victim has passed the point."""
        strike.at_s = now_s

    def ended(self, strike: Strike, view: View, now_s: float) -> None:
        """A fault that leaves its process alive is over."""
        strike.recovered_s = now_s
        seen = view.seen.get(strike.victim)
        strike.baseline = seen.progress if seen else None

    def observe(self, view: View, now_s: float) -> None:
        """Note restarts, and how far the victims have come."""
        self.now_s = now_s
        for name, seen in view.seen.items():
            if self._pids.get(name, seen.pid) != seen.pid:
                self.restarts[name] += 1
            self._pids[name] = seen.pid
        for strike in self.strikes:
            if not strike.over and strike.at_s is not None:
                _follow(strike, view.seen.get(strike.victim), now_s)

    def unasked(self) -> dict[str, int]:
        """Restarts of processes that no fault had struck, or not so often (B34)."""
        allowed: Counter[str] = Counter()
        for strike in self.strikes:
            if strike.fault.lethal and strike.at_s is not None:
                allowed.update(BUS if strike.victim in BUS else (strike.victim,))
        return {name: count - allowed[name] for name, count in self.restarts.items() if count > allowed[name]}


def owner_of(fault: Fault) -> str:
    """The role whose process is struck, or whose child is."""
    return {WORKER: "reward", SAVE: "dcs"}.get(fault.role, fault.role)


def _follow(strike: Strike, seen: Seen | None, now_s: float) -> None:
    replaced = seen is not None and seen.pid != strike.pid
    if strike.detected_s is None and (seen is None or seen.state in LOST or replaced):
        strike.detected_s = now_s
    if strike.recovered_s is None:
        if strike.fault.lethal and seen is not None and replaced and seen.state in UP:
            strike.recovered_s, strike.baseline = now_s, seen.progress
        return
    if seen is not None and seen.state in UP and (seen.progress != strike.baseline or seen.state == "done"):
        strike.progressed_s = now_s


# ---------------------------------------------------------------------- the verdict


@dataclass(frozen=True, slots=True)
class Ended:
    """What the ended run shows: its summary's figures, and its ledger's.

    `trained_by_step`: groups of each step. `trained_samples`: by the ledger; `trained`: by the bus.
    """

    state: str
    reason: str | None
    violations: Sequence[str]
    steps: int
    reward_last: float | None = None
    produced: int = 0
    trained: int = 0
    dropped: int = 0
    queued: int = 0
    admitted: int = 0
    next_seq: int = 0
    open: int = 0
    refused: int = 0
    trained_samples: int = 0
    trained_by_step: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`broken`: a sentence for each thing that does not hold."""

    broken: list[str]

    @property
    def ok(self) -> bool:
        return not self.broken


def verdict(ended: Ended, conductor: Conductor, reward_min: float | None) -> Verdict:
    """Whether the run went through as if nothing had happened (B12, B16, B34)."""
    broken: list[str] = []
    struck = [strike for strike in conductor.strikes if strike.at_s is not None]
    if ended.state != "finished":
        broken.append(f"the run {ended.state}: {ended.reason}")
    # The run counts every restart as unasked, faults included: the conductor knows which they were.
    explained = [
        RESTARTED,
        *([UNSAVED] if any(s.fault.how is How.FULL or s.fault.role == "dcs" for s in struck) else []),
    ]
    broken += [f"not met: {text}" for text in ended.violations if not text.startswith(tuple(explained))]
    if reward_min is not None and (ended.reward_last is None or ended.reward_last < reward_min):
        broken.append(f"reward {ended.reward_last} at the end, at least {reward_min} is asked for")
    broken += _account(ended)
    broken += [f"{name} restarted unasked, {count} times" for name, count in sorted(conductor.unasked().items())]
    broken += [f"{planned.fault} was not injected: its role was not ready" for planned in conductor.pending]
    for strike in conductor.strikes:
        if strike.at_s is None:
            broken.append(f"{strike.fault} was not injected: {strike.victim} did not pass the point")
        elif strike.recovered_s is None and not (ended.state == "finished" and conductor.now_s - strike.at_s < END_S):
            broken.append(f"{strike.victim} did not recover from {strike.fault} at {strike.at_s:.1f} s")
        elif not strike.over and ended.state != "finished":
            broken.append(f"{strike.victim} made no progress after {strike.fault} at {strike.at_s:.1f} s")
    return Verdict(broken)


def _account(ended: Ended) -> list[str]:
    broken: list[str] = []
    if ended.produced != ended.trained + ended.dropped + ended.queued:
        broken.append(
            f"samples do not add up: {ended.produced} produced, {ended.trained} trained, {ended.dropped} dropped, "
            f"{ended.queued} queued"
        )
    if ended.trained_samples != ended.trained:
        broken.append(f"the ledger has {ended.trained_samples} trained samples, the bus {ended.trained}")
    if ended.next_seq != ended.admitted:
        broken.append(f"{ended.next_seq} groups were numbered and {ended.admitted} are in the ledger")
    if ended.open:
        broken.append(f"{ended.open} of {ended.admitted} admitted groups have no end")
    if ended.refused:
        broken.append(f"{ended.refused} groups came to a second, different end")
    missing = [step for step in range(1, ended.steps + 1) if not ended.trained_by_step.get(step)]
    if missing and ended.state == "finished":
        broken.append(f"steps without a trained group: {missing[:10]}")
    return broken

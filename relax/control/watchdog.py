"""When nothing moves, say which queue waits for whom (B46). Pure: snapshots in, sentences out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TOPIC_OF_TASK: Mapping[str, str] = {"rollout": "prompts", "reward": "samples", "ref": "samples", "actor": "samples"}


@dataclass(frozen=True, slots=True)
class RoleSnapshot:
    """One replica. `last_progress_at_s`: when a counter of it last moved; see `ProgressTracker`."""

    role: str
    replica: str
    last_progress_at_s: float
    state: str = ""
    """Its own words, such as "idle" or "generating"."""
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeaseSnapshot:
    """Rows that one owner holds for one task, the oldest of these leases begun at `since_s`."""

    task: str
    owner: str
    rows: int
    since_s: float


@dataclass(frozen=True, slots=True)
class BusSnapshot:
    """rows: held per topic; ready: rows that could be leased now, per task; oldest_s: when the oldest row came."""

    rows: Mapping[str, int]
    ready: Mapping[str, int]
    leases: Sequence[LeaseSnapshot] = ()
    oldest_s: Mapping[str, float] = field(default_factory=dict)
    closed: frozenset[str] = frozenset()
    """Topics that take no more rows."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Nothing moved for `for_s`. One sentence per queue, and (who waits, for whom) by role."""

    for_s: float
    sentences: tuple[str, ...]
    waits: tuple[tuple[str, str], ...]

    def text(self) -> str:
        chain = "; ".join(f"{waiter} waits for {culprit}" for waiter, culprit in self.waits)
        return f"nothing moved for {self.for_s:.0f} s: {chain}. " + ". ".join(self.sentences)


class ProgressTracker:
    """Remembers when each replica's counters last changed."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[dict[str, float], float]] = {}

    def update(self, role: str, replica: str, counters: Mapping[str, float], now_s: float) -> float:
        """When a counter of this replica last moved. The first report counts as progress."""
        had = self._seen.get((role, replica))
        if had is None or had[0] != dict(counters):
            self._seen[role, replica] = (dict(counters), now_s)
        return self._seen[role, replica][1]

    def forget(self, role: str, replica: str) -> None:
        """The replica is gone on purpose."""
        self._seen.pop((role, replica), None)


def find_stall(roles: Sequence[RoleSnapshot], bus: BusSnapshot, now_s: float, stall_s: float) -> Stall | None:
    """None while any replica moved within `stall_s`, and before any has reported."""
    if not roles:
        return None
    still_s = now_s - max(role.last_progress_at_s for role in roles)
    if still_s < stall_s:
        return None
    sentences = tuple(_sentence(topic, roles, bus, now_s) for topic in ("prompts", "samples"))
    return Stall(still_s, sentences, tuple(_waits(roles, bus)))


def _sentence(topic: str, roles: Sequence[RoleSnapshot], bus: BusSnapshot, now_s: float) -> str:
    """Such as `samples queue: 12 rows; 0 ready for actor; 32 rows leased for reward by reward-0 since 61 s`."""
    rows = bus.rows.get(topic, 0)
    parts = [
        f"{rows} rows" + (f", the oldest {now_s - bus.oldest_s[topic]:.0f} s old" if topic in bus.oldest_s else "")
    ]
    if topic in bus.closed:
        parts[0] += ", closed"
    for task in _tasks(topic, roles, bus):
        parts.append(f"{bus.ready.get(task, 0)} ready for {task}")
        parts += [
            f"{lease.rows} rows leased for {task} by {lease.owner} since {now_s - lease.since_s:.0f} s"
            for lease in bus.leases
            if lease.task == task
        ]
        holders = {lease.owner for lease in bus.leases if lease.task == task}
        parts += [
            f"{role.replica} {role.state or 'idle'}"
            for role in roles
            if role.role == task and role.replica not in holders
        ]
    return f"{topic} queue: " + "; ".join(parts)


def _tasks(topic: str, roles: Sequence[RoleSnapshot], bus: BusSnapshot) -> list[str]:
    """Tasks of a topic that this run has."""
    present = {role.role for role in roles} | set(bus.ready) | {lease.task for lease in bus.leases}
    return [task for task, of in TOPIC_OF_TASK.items() if of == topic and task in present]


def _waits(roles: Sequence[RoleSnapshot], bus: BusSnapshot) -> list[tuple[str, str]]:
    """From the trainer back to whoever has work and does not do it.

    A task with rows, ready or leased, is the end of its chain: nobody upstream is to blame for it.
    """
    if _has_work("actor", bus):
        return [("the run", _holder("actor", bus))]
    scorers = [task for task in _tasks("samples", roles, bus) if task != "actor" and _has_work(task, bus)]
    if scorers:
        return [("actor", _holder(task, bus)) for task in scorers]
    if _has_work("rollout", bus):
        return [("actor", _holder("rollout", bus))]
    if bus.rows.get("samples", 0) and not bus.rows.get("prompts", 0):
        return [("actor", "the verdict on the rows in samples")]
    if bus.rows.get("prompts", 0):
        return [("actor", "rollout"), ("rollout", "a version new enough for the prompts, or the groups' other samples")]
    return [("actor", "rollout"), ("rollout", "the prompt source" + (" (closed)" if "prompts" in bus.closed else ""))]


def _has_work(task: str, bus: BusSnapshot) -> bool:
    return bus.ready.get(task, 0) > 0 or any(lease.task == task for lease in bus.leases)


def _holder(task: str, bus: BusSnapshot) -> str:
    owners = sorted({lease.owner for lease in bus.leases if lease.task == task and lease.rows})
    return ", ".join(owners) if owners else f"{task}, which leases nothing of {bus.ready.get(task, 0)} ready rows"

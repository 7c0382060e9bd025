"""Who has a fault: silence, counters that stand still, errors, stragglers. Pure: what was heard in, findings out.

A slow role is told apart from a stuck one by its counters, and one that waits for another, as it says itself, is not
stuck. Times are seconds of the caller's clock.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relax.config.recovery import RecoveryConfig
from relax.control.recovery import Fault

MEASURED = 3
"""Intervals before a median is believed."""
STARTING = "starting"
IDLE_STATES = frozenset({"done", "stopped"})
PASSIVE_ROLES = frozenset({"dcs", "rollout"})
"""They answer others and wait by design: standing counters say nothing of them."""


@dataclass(slots=True)
class ProgressTimes:
    """How long a replica's counters take to move while it waits for nobody."""

    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    _busy_since_s: float | None = None

    def moved(self, now_s: float) -> None:
        if self._busy_since_s is not None:
            self.intervals_s.append(now_s - self._busy_since_s)
        self._busy_since_s = now_s

    def waits(self) -> None:
        """What it waits for takes its time; that is not its own."""
        self._busy_since_s = None

    def works(self, now_s: float) -> None:
        if self._busy_since_s is None:
            self._busy_since_s = now_s

    def still_s(self, now_s: float) -> float:
        """For how long it has worked and no counter has moved; 0 while it waits."""
        return 0.0 if self._busy_since_s is None else now_s - self._busy_since_s

    def median_s(self) -> float | None:
        return statistics.median(self.intervals_s) if len(self.intervals_s) >= MEASURED else None


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """What is known of one replica. `gone`: its process is known to be dead. `still_s`, `median_s`: as `ProgressTimes`
    has them."""

    role: str
    instance: str
    replica_id: str
    state: str
    silent_s: float
    still_s: float = 0.0
    median_s: float | None = None
    gone: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """`replica_id`: of whom it is said; its successor is another."""

    role: str
    instance: str
    replica_id: str
    fault: Fault
    detail: str


def silence_limit_s(role: str, config: RecoveryConfig) -> float:
    own = config.deadlines.get(role)
    return own.silence_s if own is not None and own.silence_s is not None else config.silence_s


def progress_limit_s(role: str, median_s: float | None, config: RecoveryConfig) -> float:
    """`median_s`: measured time between two moves of the counters; None before it is known."""
    own = config.deadlines.get(role)
    if own is not None and own.progress_s is not None:
        return own.progress_s
    if median_s is None:
        return max(config.progress_floor_s, config.start_s)
    return max(config.progress_floor_s, config.progress_factor * median_s)


def find_faults(replicas: Sequence[ReplicaHealth], config: RecoveryConfig) -> list[Finding]:
    """At most one fault of each replica, the most certain one."""
    findings = []
    for replica in replicas:
        found = _fault_of(replica, config)
        if found is not None:
            fault, detail = found
            findings.append(Finding(replica.role, replica.instance, replica.replica_id, fault, detail))
    return findings


def _fault_of(replica: ReplicaHealth, config: RecoveryConfig) -> tuple[Fault, str] | None:
    silence_s = silence_limit_s(replica.role, config)
    if replica.state == STARTING:  # imports and models may hold its loop up
        silence_s = max(silence_s, config.start_s)
    if replica.gone:
        return Fault.REPLICA_DEAD, "its process is gone"
    if replica.silent_s >= silence_s:
        return Fault.SILENT, f"no heartbeat for {replica.silent_s:.1f} s, the limit is {silence_s:g} s"
    if replica.error is not None:
        return Fault.ERROR, replica.error.strip().splitlines()[-1]
    if replica.state in IDLE_STATES or replica.role in PASSIVE_ROLES:
        return None
    limit_s = progress_limit_s(replica.role, replica.median_s, config)
    if replica.still_s >= limit_s:
        return (
            Fault.HUNG,
            f"it works and no counter has moved for {replica.still_s:.1f} s, the limit is {limit_s:.1f} s",
        )
    if replica.median_s is not None and replica.still_s >= max(config.progress_floor_s / 2, _slow_s(replica, config)):
        detail = f"no counter has moved for {replica.still_s:.1f} s, the median is {replica.median_s:.1f} s"
        return Fault.SLOW, detail
    return None


def _slow_s(replica: ReplicaHealth, config: RecoveryConfig) -> float:
    assert replica.median_s is not None
    return config.slow_factor * replica.median_s


MIN_WORK = 0.1
"""Requests that must have run on average, for a rate to be believed."""


@dataclass(slots=True)
class Throughput:
    """Tokens and request-seconds (a request that runs for a second) of one instance over the last `window_s`."""

    _seen: deque[tuple[float, float, float]] = field(default_factory=deque)

    def observe(self, now_s: float, tokens: float, request_s: float, window_s: float) -> None:
        """Both since the start of the instance."""
        self._seen.append((now_s, tokens, request_s))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= window_s:
            self._seen.popleft()

    def rate(self, window_s: float) -> float | None:
        """tokens/s of one running request; None before the window is full, or with hardly any work in it."""
        if len(self._seen) < 2:
            return None
        (begin, first, before), (end, last, since) = self._seen[0], self._seen[-1]
        if end - begin < window_s or since - before < MIN_WORK * window_s:
            return None
        return (last - first) / (since - before)


def find_stragglers(rates: Mapping[str, float | None], factor: float) -> dict[str, float]:
    """Instance -> its part of the median rate of its peers, of those below `factor`. Fewer than two: none."""
    known = {name: rate for name, rate in rates.items() if rate is not None}
    found = {}
    for name, rate in known.items():
        peers = [other for peer, other in known.items() if peer != name]
        median = statistics.median(peers) if peers else 0.0
        if median > 0 and rate < factor * median:
            found[name] = rate / median
    return found

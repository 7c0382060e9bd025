"""The live state of the run as samples of the table in `relax.telemetry.live`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bus.records import BusStats
from relax.control.recovery import Fault
from relax.control.runstate import RunState
from relax.telemetry.live import INSTANCE_STATES, OTHER_STATE, ROLE_STATES, RUN_STATES, TIME_KINDS, LiveSample
from services import names
from services.controller.book import ReplicaAccount, RunBook
from services.controller.incidents import OWN_KINDS, ROLE_KINDS, Incidents

LOGPROB_GAP_BANDS = {"float32": 1e-4, "bfloat16": 0.1}
"""By the engine's type, in nats; measured. Engine and trainer batch differently, and bfloat16 rounds at 2^-8."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """What the samples are made from. `tracker_errors`: by tracker. `now`: monotonic seconds."""

    book: RunBook
    bus: BusStats | None
    state: RunState
    stalled: bool
    incidents: Incidents
    tracker_errors: Mapping[str, int]
    engine_dtype: str
    now: float
    faults: Mapping[str, int] = field(default_factory=dict)
    """Incidents of the operations log, by fault."""


def live_samples(live: LiveState) -> list[LiveSample]:
    return [*_run(live), *_replicas(live), *_instances(live.book), *_bus(live.bus)]


def _run(live: LiveState) -> Iterator[LiveSample]:
    yield LiveSample("run_state", float(RUN_STATES[live.state.value]))
    yield LiveSample("run_steps", float(live.book.args.run.steps))
    yield LiveSample("run_stalled", float(live.stalled))
    yield LiveSample("logprob_gap_band", LOGPROB_GAP_BANDS[live.engine_dtype])
    for tracker, errors in live.tracker_errors.items():
        yield LiveSample("tracker_errors", float(errors), {"tracker": tracker})
    own = {"role": names.CONTROLLER, "instance": names.CONTROLLER}
    for kind in OWN_KINDS:
        yield LiveSample("incidents", float(live.incidents.counts[kind]), {**own, "kind": kind})

    for fault in Fault:
        yield LiveSample("incidents", float(live.faults.get(fault.value, 0)), {**own, "kind": fault.value})


def _replicas(live: LiveState) -> Iterator[LiveSample]:
    lost = set(live.book.lost(live.now))
    versions = [version for account in live.book.replicas.values() if (version := _version(account)) is not None]
    newest = max(versions, default=0)
    for name, account in live.book.replicas.items():
        if account.retired:
            continue
        beat = account.beat
        labels = {"role": beat.role, "instance": name}
        state = "lost" if name in lost else beat.state
        numbers = {
            "role_state": ROLE_STATES.get(state, OTHER_STATE),
            "role_up": state not in ("lost", "failed"),
            "heartbeat_age_s": live.now - account.seen_at,
            "progress_age_s": live.now - account.progress_at,
            "restarts": account.restarts,
        }
        version = _version(account)
        if version is not None:
            numbers |= {"held_version": version, "version_behind": newest - version}
        if "rows" in beat.counters or "rows" in account.past_counters:
            numbers["rows_done"] = account.counter("rows")
        yield from _samples(numbers, labels)
        shares = account.pace.shares()
        for kind in TIME_KINDS:
            if f"{kind}_s" in shares:
                yield LiveSample("time_share", shares[f"{kind}_s"], {**labels, "kind": kind})
        for kind, (counter, roles) in ROLE_KINDS.items():
            if roles is None or beat.role in roles:
                yield LiveSample("incidents", account.counter(counter), {**labels, "kind": kind})


def _instances(book: RunBook) -> Iterator[LiveSample]:
    for name, account in book.replicas.items():
        if account.retired:
            continue
        facts = account.beat.facts
        labels = {"role": account.beat.role, "instance": name}
        if account.beat.role in (names.INSTANCE, names.EVALUATOR):
            numbers = {
                "generated_tokens": account.counter("tokens"),
                "generated_tokens_per_s": account.pace.tokens_per_s(),
                "running_samples": facts.get("running", 0),
                "waiting_samples": facts.get("waiting", 0),
                "adoptions": account.counter("adoptions"),
                "swap_stall_s": facts.get("swap_stall_s", 0.0),
            }
            adoption = book.adoptions.get(name)
            if adoption is not None:
                numbers |= {"adoption_s": adoption.seconds, "adoption_gap_max": adoption.gap_max}
            yield from _samples(numbers, labels)
        elif account.beat.role == names.ROLLOUT:
            for instance, told in facts.get("instances", {}).items():
                code = INSTANCE_STATES.get(told["state"], OTHER_STATE)
                yield LiveSample("instance_state", float(code), {"instance": instance})
        elif account.beat.role == names.REWARD:
            yield LiveSample("reward_failed_share", float(facts.get("failed_share", 0.0)))


def _bus(stats: BusStats | None) -> Iterator[LiveSample]:
    if stats is None:
        return
    yield from _samples(
        {
            "bus_held_rows": stats.rows + stats.reserved_rows,
            "bus_max_rows": stats.max_rows,
            "bus_held_bytes": stats.bytes,
            "bus_max_bytes": stats.max_bytes,
            "bus_retained_bytes": stats.retained_bytes,
            "bus_open_groups": stats.open_groups,
            "bus_oldest_group_s": stats.oldest_age_s,
            "samples_running": stats.account.running,
            "samples_waiting": stats.account.waiting,
        },
        {},
    )
    for task, count in stats.ready.items():
        yield LiveSample("bus_ready", float(count), {"task": task})
    for reason, count in stats.account.dropped.items():
        yield LiveSample("dropped_samples", float(count), {"reason": reason})


def _version(account: ReplicaAccount) -> int | None:
    version = account.beat.facts.get("version")
    return None if version is None else int(version)


def _samples(numbers: Mapping[str, float], labels: Mapping[str, str]) -> Sequence[LiveSample]:
    return [LiveSample(name, float(value), labels) for name, value in numbers.items()]

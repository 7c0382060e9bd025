"""The table of live state: what the controller exports at each tick, beside the record of each step (B42).

The same kinds and names as in the table of step metrics, and labels: `role`, `instance` and what else a metric is
divided by. Every series also carries the label `run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from relax.control.lifecycle import InstanceState
from relax.control.runstate import RunState
from relax.telemetry.metrics import Kind, Metric, Reduction, problem_with

REPLICA = ("role", "instance")
TIME_KINDS = ("work", "wait_data", "wait_weights", "idle")

OTHER_STATE = 0
ROLE_STATES: Mapping[str, int] = MappingProxyType(
    {"starting": 1, "waiting_weights": 2, "running": 3, "active": 4, "done": 5, "stopped": 6, "lost": 7, "failed": 8}
)
RUN_STATES: Mapping[str, int] = MappingProxyType({state.value: code for code, state in enumerate(RunState, 1)})
INSTANCE_STATES: Mapping[str, int] = MappingProxyType(
    {state.value: code for code, state in enumerate(InstanceState, 1)}
)
"""States as numbers, for a time line; 0 is a state without a number."""

_LAST, _SUM, _MEAN, _MAX, _MIN = Reduction.LAST, Reduction.SUM, Reduction.MEAN, Reduction.MAX, Reduction.MIN
_COUNTER, _SHARE = Kind.COUNTER, Kind.SHARE


def _codes(states: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {state}" for state, code in states.items())


_TABLE = (
    # The run
    Metric("run_state", "1", f"State of the run: {_codes(RUN_STATES)}", _LAST),
    Metric("run_steps", "steps", "Training steps that the run is to make", _LAST),
    Metric("run_stalled", "1", "1 while no counter of any role moves for controller.stall_s", _MAX),
    Metric("logprob_gap_band", "nats", "Largest logprob_gap_mean that the arithmetic of the engines explains", _LAST),
    Metric(
        "incidents",
        "incidents",
        "What went wrong and was dealt with, by kind",
        _SUM,
        _COUNTER,
        labels=(*REPLICA, "kind"),
    ),
    Metric("tracker_errors", "errors", "Records that a tracker could not take", _SUM, _COUNTER, labels=("tracker",)),
    # Roles and instances
    Metric("role_state", "1", f"State of a replica: {_codes(ROLE_STATES)}", _LAST, labels=REPLICA),
    Metric("role_up", "1", "1 when the replica is neither silent nor failed", _MIN, labels=REPLICA),
    Metric("instance_state", "1", f"Life cycle of an instance: {_codes(INSTANCE_STATES)}", _LAST, labels=("instance",)),
    Metric("heartbeat_age_s", "s", "Time since the last heartbeat", _MAX, labels=REPLICA),
    Metric("progress_age_s", "s", "Time since a counter of the replica moved", _MAX, labels=REPLICA),
    Metric("restarts", "restarts", "Replicas replaced by another one", _SUM, _COUNTER, labels=REPLICA),
    Metric("held_version", "1", "Policy version that the replica holds", _MIN, labels=REPLICA),
    Metric("version_behind", "versions", "Newest published version less the one held", _MAX, labels=REPLICA),
    Metric(
        "time_share",
        "1",
        "Part of the replica's last seconds, by kind: work, wait_data, wait_weights, idle",
        _MEAN,
        _SHARE,
        labels=(*REPLICA, "kind"),
    ),
    # Throughput
    Metric("rows_done", "rows", "Rows trained, scored or rewarded by the replica", _SUM, _COUNTER, labels=REPLICA),
    Metric("generated_tokens", "tokens", "Tokens that the instance sampled", _SUM, _COUNTER, labels=REPLICA),
    Metric("generated_tokens_per_s", "tokens/s", "The same per second of the last seconds", _SUM, labels=REPLICA),
    Metric("running_samples", "samples", "Samples that the engine is generating", _SUM, labels=REPLICA),
    Metric("waiting_samples", "samples", "Samples that wait for a slot of the engine", _SUM, labels=REPLICA),
    # Weights
    Metric("adoptions", "adoptions", "Weight versions that the instance took", _SUM, _COUNTER, labels=REPLICA),
    Metric("adoption_s", "s", "Time that the last adoption took: reading, verifying, exchanging", _MAX, labels=REPLICA),
    Metric("adoption_gap_max", "nats", "logprob_gap_max of the instance's last adoption", _MAX, labels=REPLICA),
    Metric(
        "swap_stall_s", "s", "Time for which decoding stood still for weight updates", _SUM, _COUNTER, labels=REPLICA
    ),
    # The bus
    Metric("bus_held_rows", "rows", "Rows that the bus holds, reservations included", _LAST),
    Metric("bus_max_rows", "rows", "run.bus.max_rows", _LAST),
    Metric("bus_held_bytes", "bytes", "Bytes that the bus holds, reservations included", _LAST),
    Metric("bus_max_bytes", "bytes", "run.bus.max_bytes", _LAST),
    Metric("bus_retained_bytes", "bytes", "Bytes of trained rows kept until a checkpoint covers them", _LAST),
    Metric("bus_open_groups", "groups", "Groups in the bus that have not ended", _LAST),
    Metric("bus_oldest_group_s", "s", "Age of the oldest group that has not ended", _MAX),
    Metric("bus_ready", "items", "Rows or groups that a task could lease now", _LAST, labels=("task",)),
    Metric("samples_running", "samples", "Samples being generated", _LAST),
    Metric("samples_waiting", "samples", "Samples admitted and not leased", _LAST),
    Metric("dropped_samples", "samples", "Samples dropped, by reason", _LAST, _COUNTER, labels=("reason",)),
    # Rewards
    Metric("reward_failed_share", "1", "Part of the last reward calls that failed", _MEAN, _SHARE),
)

LIVE: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _TABLE})


@dataclass(frozen=True, slots=True)
class LiveSample:
    """One value of one series. `labels` are those that the table gives the metric, `run` left out."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def check_live(samples: Iterable[LiveSample]) -> tuple[list[LiveSample], dict[str, str]]:
    """The samples that the table allows; of the others, by series, what is wrong.

    A share over 1 means that two clocks disagree.
    """
    good: list[LiveSample] = []
    problems: dict[str, str] = {}
    for sample in samples:
        problem = _problem(sample)
        if problem is None:
            good.append(sample)
        else:
            series = " ".join((sample.name, *sample.labels.values()))
            problems[series] = f"{series}: {problem}"
    return good, problems


def _problem(sample: LiveSample) -> str | None:
    metric = LIVE.get(sample.name)
    if metric is None:
        return "unknown live metric"
    if set(sample.labels) != set(metric.labels):
        return f"has the labels {sorted(sample.labels)}, not {sorted(metric.labels)}"
    return problem_with(metric, sample.value)

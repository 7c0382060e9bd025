"""The one table of metrics: what each is, its unit, and how several values of it become one (B42)."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from relax.types import RelaxError


class MetricError(RelaxError, ValueError):
    """A record holds a metric that the table does not know, or a value that the metric cannot take."""


class Reduction(enum.StrEnum):
    """How the values of ranks, replicas or steps become one."""

    LAST = "last"
    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"


class Kind(enum.StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    """A total since the start of the run; never negative."""
    SHARE = "share"
    """Part of a whole, utilisations included: in [0, 1]."""


@dataclass(frozen=True, slots=True)
class Metric:
    """`unit` is written as in the name's suffix; "1" has none. `labels`: what live state is divided by."""

    name: str
    unit: str
    help: str
    reduction: Reduction
    kind: Kind = Kind.GAUGE
    labels: tuple[str, ...] = ()

    @property
    def prometheus(self) -> str:
        """Prometheus wants base units spelt out, and `_total` on counters."""
        stem = self.name
        for suffix, word in (("_ms", "_milliseconds"), ("_per_s", "_per_second"), ("_s", "_seconds")):
            if stem.endswith(suffix):
                stem = stem.removesuffix(suffix) + word
                break
        return f"relax_{stem}" + ("_total" if self.kind is Kind.COUNTER else "")


_LAST, _SUM, _MEAN, _MAX = Reduction.LAST, Reduction.SUM, Reduction.MEAN, Reduction.MAX

_TABLE = (
    Metric("step", "1", "Committed training steps", _LAST),
    Metric("version", "1", "Policy version that the step published", _LAST),
    # Learning
    Metric("reward_mean", "1", "Mean reward of the step's samples", _MEAN),
    Metric("reward_std", "1", "Standard deviation of the step's rewards", _MEAN),
    Metric("accuracy_mean", "1", "Mean raw value of the first reward part", _MEAN),
    Metric("loss", "1", "Loss of the step: loss sum over its normaliser", _MEAN),
    Metric("policy_loss", "1", "Policy part of the loss", _MEAN),
    Metric("kl", "nats", "KL estimate to the reference policy per token", _MEAN),
    Metric("entropy", "nats", "Mean token entropy of the policy", _MEAN),
    Metric("grad_norm", "1", "Global gradient norm before clipping", _MAX),
    Metric("lr", "1", "Learning rate of the update", _LAST),
    Metric("ratio_mean", "1", "Mean importance ratio per token", _MEAN),
    Metric("clip_fraction_low", "1", "Share of tokens whose ratio was clipped from below", _MEAN, Kind.SHARE),
    Metric("clip_fraction_high", "1", "Share of tokens whose ratio was clipped from above", _MEAN, Kind.SHARE),
    Metric("correction_weight_mean", "1", "Mean importance weight per token, truncated and masked", _MEAN),
    Metric("correction_truncated", "1", "Share of tokens whose importance weight was truncated", _MEAN, Kind.SHARE),
    Metric("correction_rejected", "1", "Share of tokens rejected by their ratio or their lag", _MEAN, Kind.SHARE),
    Metric("m2_masked", "1", "Share of tokens masked to bound the second moment (M2PO)", _MEAN, Kind.SHARE),
    Metric("teacher_kl", "nats", "KL(student || teacher) per token, estimated on the student's samples", _MEAN),
    Metric("teacher_topk_kl", "nats", "KL between policy and teacher over the teacher's likeliest tokens", _MEAN),
    Metric("updates", "updates", "Optimizer updates of the policy in the step", _SUM),
    Metric("nll", "nats", "Negative log-likelihood per response token (SFT)", _MEAN),
    Metric("preference_accuracy", "1", "Share of pairs with a positive margin (DPO)", _MEAN, Kind.SHARE),
    Metric("preference_margin", "nats", "Mean margin of the implicit rewards (DPO)", _MEAN),
    # The critic
    Metric("value_loss", "1", "Loss of the critic", _MEAN),
    Metric("value_mean", "1", "Mean value of the trained tokens", _MEAN),
    Metric("value_error", "1", "Mean squared difference of values before the step and returns", _MEAN),
    Metric("value_clip_fraction", "1", "Share of tokens whose value was clipped", _MEAN, Kind.SHARE),
    Metric("critic_grad_norm", "1", "Global gradient norm of the critic before clipping", _MAX),
    # Agreement of trainer and engine, and lag
    Metric("logprob_gap_max", "nats", "Largest |trainer - engine| log-prob on the probe, at equal version", _MAX),
    Metric("logprob_gap_mean", "nats", "Mean |trainer - engine| log-prob on the probe, at equal version", _MEAN),
    Metric("logprob_diff_mean", "nats", "Mean |trainer - rollout| log-prob of the trained tokens, lag included", _MEAN),
    Metric("logprob_diff_max", "nats", "Largest |trainer - rollout| log-prob of the trained tokens", _MAX),
    Metric("rollout_kl", "nats", "k3 estimate of KL(rollout || trainer) on the trained tokens", _MEAN),
    Metric("policy_kl", "nats", "KL between the policy that sampled and the policy trained: the cost of lag", _MEAN),
    Metric(
        "stale_kv_gap", "nats", "Mean |trainer - rollout| log-prob of tokens drawn over keys of older versions", _MEAN
    ),
    Metric("version_lag_max", "versions", "Largest lag of a trained token behind the trainer", _MAX),
    Metric("version_lag_mean", "versions", "Mean lag of the trained tokens behind the trainer", _MEAN),
    # Speed and where time goes
    Metric("tokens_per_s", "tokens/s", "Response tokens trained per second of the step", _SUM),
    Metric("response_tokens_mean", "tokens", "Mean response length of the step's samples", _MEAN),
    Metric("step_s", "s", "Wall time of the step, waiting included", _MAX),
    Metric("train_compute_s", "s", "Time of the step in forward, backward and update", _MAX),
    Metric(
        "engine_busy_s", "s", "Time since the last step's report in which an engine computed, mean over engines", _MEAN
    ),
    Metric("wait_data_s", "s", "Time of the step in which the trainer waited for samples", _MAX),
    Metric("publish_s", "s", "Time of the step for staging and committing the new weights", _MAX),
    Metric("trainer_utilisation", "1", "train_compute_s over step_s", _MEAN, Kind.SHARE),
    # Groups and samples
    Metric("groups_trained", "groups", "Groups trained in the step", _SUM),
    Metric("groups_filtered", "groups", "Groups filtered since the record of the step before", _SUM),
    Metric("groups_dropped", "groups", "Groups dropped since the record of the step before", _SUM),
    Metric("zero_variance_groups", "groups", "Trained groups whose rewards are all equal", _SUM),
    Metric("produced", "samples", "Samples first made visible", _LAST, Kind.COUNTER),
    Metric("trained", "samples", "Samples trained", _LAST, Kind.COUNTER),
    Metric("dropped", "samples", "Samples dropped, filtered ones included", _LAST, Kind.COUNTER),
    Metric("queued", "samples", "Samples visible and not terminal", _LAST),
    Metric("bus_rows", "rows", "Rows that the bus holds", _LAST),
    Metric("bus_bytes", "bytes", "Bytes charged for the rows that the bus holds", _LAST),
    # Rewards
    Metric("reward_calls", "calls", "Reward calls answered", _SUM, Kind.COUNTER),
    Metric("reward_failures", "calls", "Reward calls that failed, timed out or crashed", _SUM, Kind.COUNTER),
    Metric("reward_retries", "calls", "Reward calls queued again", _SUM, Kind.COUNTER),
    Metric("reward_worker_restarts", "restarts", "Reward workers replaced", _SUM, Kind.COUNTER),
)

OWN_PREFIX = "own_"
"""Begins the metrics of a user's own trainer or loss: gauges without a unit, reduced by their mean."""

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _TABLE})

ROUNDING = 1e-9
"""Two clocks read one after the other may put a share this far over 1; a difference of sums as far below 0."""


def validate(record: Mapping[str, float]) -> None:
    """Check one step's record against the table.

    Raises:
        MetricError: unknown names, values that are no finite number, shares outside [0, 1] (a utilisation
            over 1 means that two clocks disagree), negative counters. All problems are named at once.
    """
    problems = [problem for name, value in record.items() if (problem := _problem(name, value)) is not None]
    if problems:
        raise MetricError("; ".join(problems))


def metric_named(name: str) -> Metric | None:
    """From the table, or an own one; None for a name that is neither."""
    if name.startswith(OWN_PREFIX):
        return Metric(name, "1", "A metric of the user's own", _MEAN)
    return METRICS.get(name)


def reduce(name: str, values: Sequence[float]) -> float:
    """One value for several of one metric, by the table.

    Raises:
        MetricError: an unknown name, or no value at all.
    """
    metric = metric_named(name)
    if metric is None:
        raise MetricError(f"unknown metric {name!r}")
    if not values:
        raise MetricError(f"metric {name!r} has no value to reduce")
    return _REDUCE[metric.reduction](values)


def reduce_records(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One record for several; a metric that only some carry is reduced over those."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: reduce(name, [record[name] for record in records if name in record]) for name in names}


_REDUCE: Mapping[Reduction, Callable[[Sequence[float]], float]] = {
    Reduction.LAST: lambda values: float(values[-1]),
    Reduction.SUM: lambda values: math.fsum(values),
    Reduction.MEAN: lambda values: math.fsum(values) / len(values),
    Reduction.MAX: lambda values: float(max(values)),
    Reduction.MIN: lambda values: float(min(values)),
}


def _problem(name: str, value: object) -> str | None:
    metric = metric_named(name)
    if metric is None:
        return f"unknown metric {name!r}; own ones begin with '{OWN_PREFIX}'"
    return problem_with(metric, value)


def problem_with(metric: Metric, value: object) -> str | None:
    """Why the metric cannot take this value; None when it can."""
    name = metric.name
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return f"{name} is {value!r}, which is no finite number"
    if metric.kind is Kind.SHARE and not -ROUNDING <= value <= 1 + ROUNDING:
        return f"{name} is {value:g}; a share lies between 0 and 1"
    if metric.kind is Kind.COUNTER and value < 0:
        return f"{name} is {value:g}; a counter is never negative"
    return None

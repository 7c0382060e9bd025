"""What a run came to: the dictionary of summary.json, and whether it is what was expected. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from relax.config.roles import ExpectConfig
from relax.types import Json

LAST_SHARE = 0.05
"""`*_last` is the mean over this share of the steps at the end, at least one: a single step is noisy."""
WARM_UP_SHARE = 0.2
"""Left out of the overhead: compilation, caches and the first weight exchange happen there."""
OVERHEAD_WINDOW = 10
RESTARTED, UNSAVED = "replicas restarted unasked", "checkpoints not saved"
"""How these two sentences of `check_expectations` begin: injected faults explain them."""
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class FinalFacts:
    """What the steps' records do not say.

    `produced` to `queued` count samples on one snapshot. `logprob_gap_mean`: the largest mean over the
    probe of any adoption. `checkpoint_error`, `dump_error`: of the last one that failed. `eval_before`, `eval_after`:
    accuracy of each held-out prompt in the same order, None without evaluation. `role_time`: role ->
    seconds by kind (work_s, wait_data_s, wait_weights_s, idle_s).
    """

    wall_s: float
    engine_versions: Mapping[str, int]
    digest_ok: bool
    logprob_gap_max: float
    produced: int
    trained: int
    dropped_by_reason: Mapping[str, int]
    queued: int
    restarts_unasked: int
    bus_restarts: int = 0
    lag_histogram: Mapping[int, int] = field(default_factory=dict)
    max_staleness: int = 0
    logprob_gap_mean: float = 0.0
    checkpoints_failed: int = 0
    checkpoint_error: str | None = None
    dumps_failed: int = 0
    dump_error: str | None = None
    spans_dropped: int = 0
    eval_before: Sequence[float] | None = None
    eval_after: Sequence[float] | None = None
    eval_parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    role_time: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def build_summary(records: Sequence[Mapping[str, float]], facts: FinalFacts, *, seed: int) -> dict[str, Json]:
    """The content of summary.json; a value that there is no data for is None.

    Raises:
        ValueError: the two evaluations are of different length.
    """
    gaps = [record["logprob_gap_max"] for record in records if "logprob_gap_max" in record]
    before, after = facts.eval_before, facts.eval_after
    gain = None if not before or not after else paired_bootstrap_lower95(before, after, seed)
    return {
        "steps": len(records),
        "wall_s": facts.wall_s,
        "reward_first": _first(records, "reward_mean"),
        "reward_last": _last(records, "reward_mean"),
        "accuracy_first": _first(records, "accuracy_mean"),
        "accuracy_last": _last(records, "accuracy_mean"),
        "engine_versions": dict(facts.engine_versions),
        "digest_ok": facts.digest_ok,
        "produced": facts.produced,
        "trained": facts.trained,
        "dropped": sum(facts.dropped_by_reason.values()),
        "dropped_by_reason": dict(facts.dropped_by_reason),
        "queued": facts.queued,
        "restarts_unasked": facts.restarts_unasked,
        "bus_restarts": facts.bus_restarts,
        "logprob_gap_max": max([*gaps, facts.logprob_gap_max]),
        "logprob_gap_mean": facts.logprob_gap_mean,
        "checkpoints_failed": facts.checkpoints_failed,
        "checkpoint_error": facts.checkpoint_error,
        "dumps_failed": facts.dumps_failed,
        "dump_error": facts.dump_error,
        "spans_dropped": facts.spans_dropped,
        "lag_histogram": {str(lag): facts.lag_histogram[lag] for lag in sorted(facts.lag_histogram)},
        "overhead_ms_per_step": overhead_ms_per_step(records, facts.max_staleness),
        "metrics_last": _metrics_last(records),
        "eval_before": statistics.fmean(before) if before else None,
        "eval_after": statistics.fmean(after) if after else None,
        "eval_gain_lower95": gain,
        "eval_parts": {when: dict(parts) for when, parts in facts.eval_parts.items()},
        "role_time": {role: dict(split) for role, split in facts.role_time.items()},
    }


def overhead_ms_per_step(records: Sequence[Mapping[str, float]], max_staleness: int) -> float | None:
    """Step time that computing does not explain, in ms: the median over windows of steps after the warm-up.

    Of a window the means count: step_s less what a step needs, which is train_compute_s plus engine_busy_s
    on-policy, and the longer of the two otherwise. Engines report once per heartbeat, so a single step's
    engine_busy_s may belong to its neighbour. None without a step that carries all three.
    """
    keys = ("step_s", "train_compute_s", "engine_busy_s")
    timed = [record for record in records[math.ceil(WARM_UP_SHARE * len(records)) :] if all(k in record for k in keys)]
    windows = [timed[start : start + OVERHEAD_WINDOW] for start in range(0, len(timed), OVERHEAD_WINDOW)]
    if len(windows) > 1 and len(windows[-1]) < OVERHEAD_WINDOW:
        windows.pop()
    values = []
    for window in windows:
        step_s, train_s, engine_s = (statistics.fmean(record[key] for record in window) for key in keys)
        values.append((step_s - (train_s + engine_s if max_staleness == 0 else max(train_s, engine_s))) * 1e3)
    return statistics.median(values) if values else None


def paired_bootstrap_lower95(before: Sequence[float], after: Sequence[float], seed: int) -> float:
    """Lower end of the one-sided 95 % interval of mean(after - before), by percentile bootstrap over the pairs.

    Raises:
        ValueError: no pairs, or sequences of different length.
    """
    if len(before) != len(after) or not before:
        raise ValueError(f"a paired comparison needs equal, non-empty sequences, got {len(before)} and {len(after)}")
    gains = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    generator = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for index in range(RESAMPLES):  # one draw at a time: all at once would take RESAMPLES x n numbers
        means[index] = gains[generator.integers(0, len(gains), len(gains))].mean()
    return float(np.quantile(means, 0.05))


def check_expectations(summary: Mapping[str, Json], expect: ExpectConfig) -> list[str]:
    """What the run broke, a sentence each; empty is good.

    The account (produced = trained + dropped + queued), unasked restarts, the digests, saved checkpoints and at
    least one trained step are checked whatever is configured.
    """
    problems = []
    if summary["steps"] == 0:
        problems.append("no step was trained")
    accounted = summary["trained"] + summary["dropped"] + summary["queued"]
    if summary["produced"] != accounted:
        problems.append(
            f"{summary['produced']} samples were produced, and {accounted} are accounted for: "
            f"{summary['trained']} trained + {summary['dropped']} dropped + {summary['queued']} queued"
        )
    if summary["restarts_unasked"] != 0:
        problems.append(f"{RESTARTED}: {summary['restarts_unasked']}")
    if not summary["digest_ok"]:
        problems.append("an engine's weight digest differs from the trainer's, or no engine reported one")
    if summary["checkpoints_failed"] != 0:
        problems.append(f"{UNSAVED}: {summary['checkpoints_failed']}; {summary['checkpoint_error']}")
    if summary["dumps_failed"] != 0:
        problems.append(f"dumps not written: {summary['dumps_failed']}; {summary['dump_error']}")
    for key, bound, at_least in (
        ("reward_first", expect.reward_first_max, False),
        ("reward_last", expect.reward_last_min, True),
        ("accuracy_last", expect.accuracy_last_min, True),
        ("eval_gain_lower95", expect.eval_gain_lower95_min, True),
        ("logprob_gap_max", expect.logprob_gap_max, False),
        ("logprob_gap_mean", expect.logprob_gap_mean, False),
    ):
        problems += _bound_problem(key, summary[key], bound, at_least)
    for bounds, at_least in ((expect.last_min, True), (expect.last_max, False)):
        for name, bound in bounds.items():
            problems += _bound_problem(f"{name} at the end", summary["metrics_last"].get(name), bound, at_least)
    return problems


def _bound_problem(key: str, value: float | None, bound: float | None, at_least: bool) -> list[str]:
    if bound is None:
        return []
    words = f"expected at {'least' if at_least else 'most'} {bound:g}"
    if value is None:
        return [f"{key} was not measured; {words}"]
    kept = value >= bound if at_least else value <= bound  # false for NaN too
    return [] if kept else [f"{key} is {value:g}; {words}"]


def _first(records: Sequence[Mapping[str, float]], name: str) -> float | None:
    return records[0].get(name) if records else None


def _metrics_last(records: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    names = dict.fromkeys(name for record in records for name in record)
    return {name: _last(records, name) for name in names}


def _last(records: Sequence[Mapping[str, float]], name: str) -> float | None:
    count = max(1, int(LAST_SHARE * len(records)))
    values = [record[name] for record in records[-count:] if name in record]
    return statistics.fmean(values) if values else None

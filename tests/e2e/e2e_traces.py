"""What the spans and the time splits of a finished run must show."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import psutil

from relax.cli.trace import write_trace
from relax.telemetry.trace import Span, by_sample, read_spans

AFTER = {
    "generate": ("lease",),
    "reward": ("generate",),
    "ref": ("generate",),
    "train": ("reward", "ref"),
    "publish": ("train",),
}
"""Span of a sample -> those that must have ended when it begins."""
ROUNDING_S = 2e-6
CLOCK_TICK_S = 0.02
"""The kernel tells the start of a process in ticks."""


def broken_ways(run_dir: Path, samples: set[str]) -> list[str]:
    """What is wrong on the way of these samples; empty is good."""
    spans, dropped = read_spans(run_dir)
    ways = by_sample(spans)
    problems = [f"{dropped} spans were dropped"] if dropped else []
    for sample in sorted(samples):
        problems += [f"{sample}: {problem}" for problem in _problems(ways.get(sample, []))]
    return problems


def _problems(way: list[Span]) -> list[str]:
    of_name = {span.name: span for span in way}
    missing = ({"lease"} | set(AFTER)) - set(of_name)
    if missing:
        return [f"no span {', '.join(sorted(missing))}"]
    problems = [f"{span.name} ends before it begins" for span in way if span.end_s < span.begin_s]
    for name, before in AFTER.items():
        problems += [
            f"{name} begins before {earlier} has ended"
            for earlier in before
            if of_name[name].begin_s < of_name[earlier].end_s - ROUNDING_S
        ]
    drawn_by, trained_to = of_name["generate"].facts["version"], of_name["publish"].facts["version"]
    if drawn_by >= trained_to or of_name["train"].facts["step"] != of_name["publish"].facts["step"]:
        problems.append(f"drawn by version {drawn_by}, trained to {trained_to}")
    return problems


def untraced_roles(run_dir: Path, steps: int) -> list[str]:
    """What the roles have no span of; empty is good."""
    spans, _ = read_spans(run_dir)
    adopted = {int(span.facts["version"]) for span in spans if span.name == "adopt"}
    trained = [int(span.facts["step"]) for span in spans if span.name == "step"]
    problems = [] if steps in adopted else [f"version {steps} is nowhere adopted: {sorted(adopted)}"]
    if trained != list(range(1, steps + 1)):
        problems.append(f"steps {trained}")
    commits = sum(span.name == "commit" for span in spans)
    return problems if commits == steps + 1 else [*problems, f"{commits} versions committed"]


BOOKED = {
    "actor": ("work_s", "wait_data_s"),
    "instance": ("work_s", "wait_data_s", "wait_weights_s"),
    "reward": ("work_s", "wait_data_s"),
    "ref": ("work_s", "wait_data_s", "wait_weights_s"),
    "rollout": ("work_s", "wait_data_s"),
    "dcs": ("work_s",),
}
"""Role -> the kinds of time that apply to it."""


def missing_times(summary: dict[str, Any]) -> list[str]:
    """Kinds of time that a role should have booked; empty is good."""
    times = summary["role_time"]
    return [f"{role}: no {kind}" for role, kinds in BOOKED.items() for kind in kinds if not times[role][kind] > 0]


def overbooked(status: dict[str, Any]) -> list[str]:
    """Replicas whose times add up to more than their process has lived; empty is good."""
    problems = []
    for view in status["roles"]:
        with contextlib.suppress(psutil.NoSuchProcess):
            age_s = time.time() - psutil.Process(view["pid"]).create_time()
            booked_s = sum(view["time_split"].values())
            if booked_s > age_s + CLOCK_TICK_S:
                problems.append(f"{view['instance']}: {booked_s:.2f} s booked, process of {age_s:.2f} s")
    return problems


def trace_events(run_dir: Path) -> list[dict[str, Any]]:
    """Of the file that `relax trace` writes."""
    out = run_dir / "trace.json"
    write_trace(run_dir, None, out)
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    return events

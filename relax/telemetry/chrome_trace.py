"""Spans as Chrome trace events, which ui.perfetto.dev and chrome://tracing open. Pure.

A process per role instance, a thread per lane (spans of one kind that do not overlap), and a flow per sample that
leads from its lease to its publication. Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

from relax.telemetry.trace import TRAIN, Span, by_sample
from relax.types import Json, RelaxError

ROLE_ORDER = ("rollout", "instance", "evaluator", "reward", "ref", "teacher", "actor", "dcs")
"""From top to bottom, as a sample goes."""
MICROSECONDS = 1e6


class TraceError(RelaxError, ValueError):
    """The trace that was asked for is empty; says why."""


def of_steps(spans: Sequence[Span], first: int, last: int) -> list[Span]:
    """What happened to the samples trained in steps `first` to `last`, and what the roles did meanwhile.

    Raises:
        TraceError: no traced sample was trained in these steps.
    """
    steps = [span for span in spans if span.name == TRAIN]
    wanted = {i for span in steps if first <= int(span.facts["step"]) <= last for i in span.sample_ids()}
    if not wanted:
        known = sorted({int(span.facts["step"]) for span in steps})
        there = f"traced are steps {known[0]} to {known[-1]}" if known else "no traced sample was trained"
        raise TraceError(f"no traced sample was trained in steps {first} to {last}: {there}")
    kept = [part for span in spans if span.samples and (part := _restricted(span, wanted)).samples]
    begin, end = min(span.begin_s for span in kept), max(span.end_s for span in kept)
    kept += [span for span in spans if not span.samples and span.end_s >= begin and span.begin_s <= end]
    return sorted(kept, key=lambda span: (span.begin_s, span.end_s))


def _restricted(span: Span, wanted: set[str]) -> Span:
    members = {group: tuple(k for k in ks if f"{group}/{k}" in wanted) for group, ks in span.samples.items()}
    return dataclasses.replace(span, samples={group: ks for group, ks in members.items() if ks})


def lanes(spans: Sequence[Span]) -> list[int]:
    """For spans in the order of their begin: the lowest lane each that is free."""
    free_at: list[int] = []
    found = []
    for span in spans:
        begin, end = _interval(span)
        lane = next((number for number, free in enumerate(free_at) if free <= begin), len(free_at))
        if lane == len(free_at):
            free_at.append(end)
        else:
            free_at[lane] = end
        found.append(lane)
    return found


def _interval(span: Span) -> tuple[int, int]:
    """Whole microseconds since the epoch; the shortest span takes one."""
    begin = round(span.begin_s * MICROSECONDS)
    return begin, max(begin + 1, round(span.end_s * MICROSECONDS))


def chrome_trace(spans: Sequence[Span]) -> dict[str, Json]:
    """The JSON object of the trace file; times in microseconds since the first span.

    Raises:
        TraceError: no span at all.
    """
    if not spans:
        raise TraceError("the run holds no spans: was run.trace_share 0?")
    zero = min(_interval(span)[0] for span in spans)
    place_of = dict(_places(spans))
    events = [*_names(spans, place_of), *(_slice(span, place_of[id(span)], zero) for span in spans)]
    for number, (sample_id, path) in enumerate(sorted(by_sample(spans).items()), 1):
        events += _flow(number, sample_id, path, place_of, zero)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"begin_unix_s": zero / MICROSECONDS}}


Place = tuple[int, int, str, int]
"""Process, thread, and the kind of span and number of the lane that the thread stands for."""


def _process_key(span: Span) -> tuple[int, str]:
    known = ROLE_ORDER.index(span.role) if span.role in ROLE_ORDER else len(ROLE_ORDER)
    return known, span.instance


def _places(spans: Sequence[Span]) -> Iterator[tuple[int, Place]]:
    """Of each span, by its `id`."""
    of_process: dict[tuple[int, str], dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in sorted(spans, key=lambda span: (span.begin_s, span.end_s)):
        of_process[_process_key(span)][span.name].append(span)
    for pid, key in enumerate(sorted(of_process), 1):
        tid = 1
        for name, alike in of_process[key].items():
            lane_of = lanes(alike)
            for span, lane in zip(alike, lane_of, strict=True):
                yield id(span), (pid, tid + lane, name, lane)
            tid += max(lane_of) + 1


def _names(spans: Sequence[Span], place_of: dict[int, Place]) -> Iterator[dict[str, Json]]:
    processes = {place_of[id(span)][0]: span for span in spans}
    for pid, span in sorted(processes.items()):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": span.instance}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for pid, tid, name, lane in sorted(set(place_of.values())):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": f"{name} {lane}"}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _slice(span: Span, place: Place, zero: int) -> dict[str, Json]:
    samples = list(span.sample_ids())
    shown = {"sample": samples[0]} if len(samples) == 1 else {"samples": len(samples), "groups": list(span.samples)}
    begin, end = _interval(span)
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.role,
        "pid": place[0],
        "tid": place[1],
        "ts": begin - zero,
        "dur": end - begin,
        "args": {**(shown if samples else {}), **span.facts},
    }


def _flow(
    number: int, sample_id: str, path: Sequence[Span], place_of: dict[int, Place], zero: int
) -> Iterator[dict[str, Json]]:
    """Arrows between the begins of the sample's spans."""
    if len(path) < 2:
        return
    for index, span in enumerate(path):
        pid, tid, _, _ = place_of[id(span)]
        phase = "s" if index == 0 else "f" if index == len(path) - 1 else "t"
        yield {
            "ph": phase,
            "name": sample_id,
            "cat": "sample",
            "id": number,
            "pid": pid,
            "tid": tid,
            "ts": _interval(span)[0] - zero,
            **({"bp": "e"} if phase == "f" else {}),
        }

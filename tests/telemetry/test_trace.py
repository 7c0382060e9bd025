from __future__ import annotations

import json
import resource
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.telemetry import trace
from relax.telemetry.chrome_trace import TraceError, chrome_trace, lanes, of_steps
from relax.telemetry.run_folder import RunFolder, RunFolderError
from relax.telemetry.trace import Span, Tracer, by_sample, read_spans


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def way(group: str, step: int, begin_s: float) -> list[Span]:
    """Group of two samples: generated apart, then together."""
    both = {group: (0, 1)}
    return [
        Span("generate", begin_s, begin_s + 1, {group: (0,)}, {"version": step - 1}, "instance", "rollout-0"),
        Span("generate", begin_s, begin_s + 2, {group: (1,)}, {"version": step - 1}, "instance", "rollout-0"),
        Span("reward", begin_s + 2, begin_s + 3, both, {}, "reward", "reward"),
        Span("train", begin_s + 3, begin_s + 4, both, {"step": step}, "actor", "actor"),
        Span("publish", begin_s + 4, begin_s + 5, both, {"step": step, "version": step}, "actor", "actor"),
        Span("step", begin_s + 2, begin_s + 5, {}, {"step": step}, "actor", "actor"),
    ]


def test_spans_are_read_back_in_the_order_of_their_begin(folder: RunFolder) -> None:
    actor, reward = Tracer(1.0, "actor", "actor"), Tracer(1.0, "reward", "reward")
    actor.add("train", 3.0, 4.0, [("g", 0), ("g", 1), ("h", 0)], step=1)
    actor.add("step", 1.5, 5.0, step=1)
    reward.add("reward", 2.0, 3.0, [("g", 0), ("g", 0)])
    for tracer in (actor, reward):
        tracer.write(folder)
    assert read_spans(folder.path) == (
        [
            Span("step", 1.5, 5.0, {}, {"step": 1}, "actor", "actor"),
            Span("reward", 2.0, 3.0, {"g": (0,)}, {}, "reward", "reward"),
            Span("train", 3.0, 4.0, {"g": (0, 1), "h": (0,)}, {"step": 1}, "actor", "actor"),
        ],
        0,
    )


def test_every_role_traces_the_same_share_of_the_groups() -> None:
    groups = [f"toy:0:{number}" for number in range(4000)]
    first, second = Tracer(0.25, "actor", "actor"), Tracer(0.25, "ref", "ref")
    traced = [group for group in groups if first.traced(group)]
    assert traced == [group for group in groups if second.traced(group)]
    assert len(traced) == pytest.approx(1000, abs=120)
    assert all(Tracer(1.0, "actor", "actor").traced(group) for group in groups)


def test_a_span_without_a_traced_sample_is_not_kept(folder: RunFolder) -> None:
    tracer = Tracer(0.25, "actor", "actor")
    out = next(f"g{n}" for n in range(99) if not tracer.traced(f"g{n}"))
    kept = next(f"g{n}" for n in range(99) if tracer.traced(f"g{n}"))
    tracer.add("train", 0.0, 1.0, [(out, 0)])
    tracer.add("train", 1.0, 2.0, [(out, 0), (kept, 3)])
    off = Tracer(0.0, "dcs", "dcs")
    off.add("commit", 0.0, 1.0)
    for one in (tracer, off):
        one.write(folder)
    assert [span.samples for span in read_spans(folder.path)[0]] == [{kept: (3,)}]


def test_what_does_not_fit_into_memory_is_dropped_and_counted(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MAX_PENDING", 3)
    tracer = Tracer(1.0, "actor", "actor")
    for step in range(5):
        tracer.add("step", step, step + 1, step=step)
    tracer.write(folder)
    tracer.add("step", 9, 10, step=9)
    tracer.write(folder)
    spans, dropped = read_spans(folder.path)
    assert [span.facts["step"] for span in spans] == [0, 1, 2, 9]
    assert dropped == tracer.dropped == 2


def test_what_the_disk_refuses_is_dropped_and_told_later(folder: RunFolder) -> None:
    """behaviour: B47"""
    tracer = Tracer(1.0, "actor", "actor")
    tracer.add("step", 0, 1, filler="x" * 8000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RunFolderError, match="File too large"):
            tracer.write(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tracer.add("step", 2, 3)
    tracer.write(folder)
    spans, dropped = read_spans(folder.path)
    assert [span.begin_s for span in spans] == [2] and dropped == tracer.dropped == 1


def test_threads_lose_no_span(folder: RunFolder) -> None:
    tracer = Tracer(1.0, "actor", "actor")

    def work() -> None:
        for number in range(500):
            tracer.add("step", number, number + 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tracer.write(folder)
    for thread in threads:
        thread.join()
    tracer.write(folder)
    assert len(read_spans(folder.path)[0]) == 2000


def test_a_torn_last_line_is_left_out_and_a_broken_one_is_an_error_with_its_place(folder: RunFolder) -> None:
    """behaviour: B13"""
    path = folder.path / "traces" / "actor.jsonl"
    path.parent.mkdir()
    path.write_text('{"name": "step", "begin_s": 1, "end_s": 2, "role": "actor"}\n{"name": "st')
    assert [span.name for span in read_spans(folder.path)[0]] == ["step"]
    path.write_text('{"name": "step", "begin_s": 1, "end_s": 2, "role": "actor"}\n{"nome": "step"}\n{}\n')
    with pytest.raises(RunFolderError, match=r"actor\.jsonl, line 2 is no span"):
        read_spans(folder.path)


def test_steps_are_cut_out_with_what_the_roles_did_meanwhile() -> None:
    spans = [*way("a", 1, 0.0), *way("b", 2, 10.0), *way("c", 3, 20.0)]
    spans.append(Span("adopt", 11.0, 11.5, {}, {"version": 1}, "instance", "rollout-0"))
    cut = of_steps(spans, 2, 2)
    assert set(by_sample(cut)) == {"b/0", "b/1"}
    assert {span.name for span in cut if not span.samples} == {"step", "adopt"}
    assert [span.facts["step"] for span in cut if span.name == "step"] == [2]
    with pytest.raises(TraceError, match=r"steps 7 to 9: traced are steps 1 to 3"):
        of_steps(spans, 7, 9)


def test_a_sample_is_followed_through_the_processes() -> None:
    events = chrome_trace(way("a", 1, 1000.0))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["rollout-0", "reward", "actor"]
    flow = [e for e in events if e.get("cat") == "sample" and e["name"] == "a/1"]
    assert [(e["ph"], processes[e["pid"]], e["ts"]) for e in flow] == [
        ("s", "rollout-0", 0),
        ("t", "reward", 2_000_000),
        ("t", "actor", 3_000_000),
        ("f", "actor", 4_000_000),
    ]
    assert len({e["id"] for e in events if e.get("cat") == "sample"}) == 2
    generated = [e for e in events if e["ph"] == "X" and e["name"] == "generate"]
    assert {e["args"]["sample"]: e["dur"] for e in generated} == {"a/0": 1_000_000, "a/1": 2_000_000}
    assert generated[0]["tid"] != generated[1]["tid"], "they overlap"


def test_a_run_without_spans_says_why() -> None:
    with pytest.raises(TraceError, match="trace_share"):
        chrome_trace([])


moments = st.integers(0, 50).map(lambda number: number / 1e7)


@given(st.lists(st.tuples(st.sampled_from(["generate", "reward"]), st.sampled_from(["a", "b"]), moments, moments)))
def test_slices_of_one_thread_never_overlap_and_every_flow_lies_on_a_slice(
    drawn: list[tuple[str, str, float, float]],
) -> None:
    """What Perfetto asks of a file. Times of fractions of a microsecond included."""
    spans = [
        Span(name, begin_s, begin_s + long_s, {f"g{number % 4}": (0,)}, {}, instance, instance)
        for number, (name, instance, begin_s, long_s) in enumerate(drawn)
    ]
    if not spans:
        return
    trace_json: dict[str, Any] = json.loads(json.dumps(chrome_trace(spans)))
    slices = defaultdict(list)
    for event in trace_json["traceEvents"]:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(len(found) for found in slices.values()) == len(spans)
    for found in slices.values():
        found.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(found))
    for event in trace_json["traceEvents"]:
        if event.get("cat") == "sample":
            assert any(begin <= event["ts"] < end for begin, end in slices[event["pid"], event["tid"]])


def test_lanes_are_as_few_as_overlap() -> None:
    spans = [Span("s", begin, end) for begin, end in ((0, 2), (1, 3), (2, 4), (3, 5))]
    assert lanes(spans) == [0, 1, 0, 1]

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.telemetry.charts import MAX_POINTS, Series, line_chart, nice_ticks, number, stacked_bars, thin_out
from relax.telemetry.report import TIME_KINDS, render_report, write_report
from relax.telemetry.run_folder import RunFolder

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parse(html: str) -> Balanced:
    page = Balanced()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


def steps(count: int) -> list[dict[str, float]]:
    return [
        {
            "step": k + 1.0,
            "reward_mean": k / count,
            "accuracy_mean": k / count,
            "loss": -0.01 * k,
            "entropy": 2.0 - k / count,
            "logprob_gap_max": 1e-6,
            "logprob_gap_mean": 1e-7,
            "version_lag_max": float(k % 2),
            "tokens_per_s": 1000.0 + k,
        }
        for k in range(count)
    ]


SUMMARY: dict[str, Any] = {
    "run": "toy",
    "state": "finished",
    "reward_last": 0.97,
    "steps": 50,
    "role_time": {"actor": {"work_s": 30.0, "wait_data_s": 10.0}, "rollout": {"work_s": 25.0, "idle_s": 15.0}},
    "violations": ["reward_last is 0.97; expected at least 0.99"],
}
SAMPLE = {"prompt": "12>", "response": "<script>alert(1)</script>", "label": "21", "reward": 0.5, "version": 3}


def test_the_report_holds_charts_role_time_samples_and_summary() -> None:
    html = render_report(steps(50), [SAMPLE], SUMMARY)
    page = parse(html)
    for title in ("Reward", "Loss", "Entropy", "Log-prob gap", "Version lag", "Throughput"):
        assert f"<b>{title}</b>" in html
    assert html.count("<polyline") == 8
    assert "Where each role" in page.text and "waits for data" in page.text
    assert "12>" in page.text and "0.97" in page.text and "expected at least 0.99" in page.text


def test_the_report_needs_no_network_and_no_script() -> None:
    html = render_report(steps(5), [SAMPLE], SUMMARY)
    assert parse(html).links == []
    assert "<script" not in html
    assert not re.search(r"url\(|@import|https?://", html)


def test_what_a_model_wrote_is_text_and_never_markup() -> None:
    html = render_report([], [{**SAMPLE, "prompt": '<b>bold</b> & "quoted"'}], {"run": "<i>name</i>"})
    assert "<script" not in html and "<b>bold" not in html and "<i>name" not in html
    assert "<script>alert(1)</script>" in parse(html).text


def test_an_empty_run_has_a_report_too(tmp_path: Path) -> None:
    path = write_report(RunFolder(tmp_path))
    assert "No step was trained" in parse(path.read_text()).text


def test_a_written_report_comes_from_the_files_of_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for record in steps(3):
        folder.append_metrics(record)
    folder.append_samples([{**SAMPLE, "response": f"r{k}"} for k in range(100)])
    folder.write_summary(SUMMARY)
    text = parse(write_report(folder).read_text()).text
    assert "r0" in text and "r99" in text and "r50" not in text


def test_a_failed_reward_shows_its_state() -> None:
    html = render_report([], [{**SAMPLE, "reward": None, "reward_state": "timeout"}], {})
    assert "timeout" in parse(html).text


values = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(values, max_size=20), st.lists(values, max_size=20))
def test_a_chart_of_any_numbers_is_well_formed_and_inside_its_frame(first: list[float], second: list[float]) -> None:
    series = [Series("a & b", list(enumerate(first)), 1), Series("c", list(enumerate(second)), 2)]
    svg = line_chart("<title>", series)
    if not svg:
        assert not any(abs(value) < float("inf") for value in first + second)
        return
    root = ElementTree.fromstring(svg)
    for circle in root.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 460 and 0 <= float(circle.attrib["cy"]) <= 210


def test_a_chart_rises_where_the_values_rise() -> None:
    root = ElementTree.fromstring(line_chart("t", [Series("a", [(1, 0.0), (2, 1.0)])]))
    (left, bottom), (right, top) = (
        tuple(map(float, place.split(",")))
        for place in root.find("polyline").attrib["points"].split()  # type: ignore[union-attr]
    )
    assert left < right and bottom > top


def test_bars_are_as_wide_as_their_share_of_the_time() -> None:
    svg = stacked_bars({"actor": {"work_s": 3.0, "idle_s": 1.0}, "ref": {}}, TIME_KINDS)
    widths = [float(bar.attrib["width"]) + 2 for bar in ElementTree.fromstring(svg).iter("rect")]
    assert len(widths) == 2
    assert widths[0] == pytest.approx(3 * widths[1], rel=1e-2)
    assert stacked_bars({"ref": {"work_s": 0.0}}, TIME_KINDS) == ""


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_enclose_the_values(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span, 4)
    assert ticks == sorted(set(ticks))
    assert 2 <= len(ticks) <= 7
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert ticks[0] <= low + slack and ticks[-1] >= low + span - slack


def test_ticks_are_round() -> None:
    assert nice_ticks(0.0, 1.0, 4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert nice_ticks(3.0, 97.0, 4) == [0.0, 25.0, 50.0, 75.0, 100.0]


def test_a_long_series_is_averaged_in_runs() -> None:
    thin = thin_out([(float(k), float(k)) for k in range(3 * MAX_POINTS)])
    assert len(thin) == MAX_POINTS
    assert thin[0] == (2.0, 1.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.25, "0.25"), (1e-6, "1e-06"), (1234.0, "1,234"), (12345.0, "12.35k"), (-0.5, "-0.5"), (3.0, "3")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text

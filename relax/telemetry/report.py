"""report.html of a run: one file without network access, light and dark, charts as inline SVG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from relax.telemetry.charts import Series, line_chart, number, stacked_bars
from relax.telemetry.metrics import METRICS
from relax.telemetry.run_folder import RunFolder
from relax.types import Json

CHARTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Reward", (("reward_mean", "reward"), ("accuracy_mean", "raw accuracy"))),
    ("Loss", (("loss", "loss"),)),
    ("Entropy", (("entropy", "entropy"),)),
    ("Log-prob gap", (("logprob_gap_max", "largest"), ("logprob_gap_mean", "mean"))),
    ("Version lag", (("version_lag_max", "largest"), ("version_lag_mean", "mean"))),
    ("Throughput", (("tokens_per_s", "tokens/s"),)),
    ("Gradient norm", (("grad_norm", "norm"),)),
    ("Step time", (("step_s", "step"), ("train_compute_s", "trainer computes"), ("wait_data_s", "waits for data"))),
)
"""Title, then metric and label of each line."""

TIME_KINDS = {"work_s": 1, "wait_data_s": 2, "wait_weights_s": 3, "idle_s": 4}
"""Kind of time -> colour."""
TIME_LABELS = {
    "work_s": "works",
    "wait_data_s": "waits for data",
    "wait_weights_s": "waits for weights",
    "idle_s": "idle",
}

TILES = (
    ("reward_last", "reward, last steps"),
    ("accuracy_last", "accuracy, last steps"),
    ("eval_after", "held-out accuracy"),
    ("eval_gain_lower95", "gain, lower 95 % bound"),
    ("steps", "steps"),
    ("wall_s", "seconds"),
    ("logprob_gap_max", "largest log-prob gap"),
    ("overhead_ms_per_step", "overhead per step, ms"),
)
"""Key of the summary and its label in the headline."""
FIRST_SAMPLES, LAST_SAMPLES = 6, 14


def write_report(folder: RunFolder) -> Path:
    """Render what the folder holds into its report.html.

    Raises:
        RunFolderError: a file cannot be read or the report cannot be written.
    """
    summary = folder.read_summary() if folder.summary_path.exists() else {}
    samples = folder.read_samples(FIRST_SAMPLES, LAST_SAMPLES)
    folder.write_text(folder.report_path, render_report(folder.read_metrics(), samples, summary))
    return folder.report_path


def render_report(
    records: Sequence[Mapping[str, float]], samples: Sequence[Mapping[str, Json]], summary: Mapping[str, Json]
) -> str:
    """The page as text. Pure."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html").render(
        run=summary.get("run") or "run",
        state=summary.get("state"),
        reason=summary.get("reason"),
        violations=summary.get("violations") or [],
        tiles=[(label, number(summary[key])) for key, label in TILES if summary.get(key) is not None],
        charts=[chart for title, lines in CHARTS if (chart := _chart(records, title, lines)) is not None],
        role_time=Markup(
            stacked_bars(
                {
                    role: {kind: seconds for kind, seconds in split.items() if kind in TIME_KINDS}
                    for role, split in (summary.get("role_time") or {}).items()
                },
                TIME_KINDS,
            )
        ),
        time_legend=[(TIME_LABELS[kind], colour) for kind, colour in TIME_KINDS.items()],
        samples=[_sample(sample) for sample in samples],
        facts=[(key, _text(value)) for key, value in summary.items() if key not in {"violations", "role_time"}],
    )


def _chart(
    records: Sequence[Mapping[str, float]], title: str, lines: Sequence[tuple[str, str]]
) -> dict[str, Any] | None:
    series = []
    for colour, (name, label) in enumerate(lines, 1):
        points = [
            (float(record.get("step", index + 1)), record[name])
            for index, record in enumerate(records)
            if name in record
        ]
        if points:
            series.append(Series(label, points, colour))
    svg = line_chart(title, series)
    if not svg:
        return None
    unit = METRICS[lines[0][0]].unit
    return {
        "title": title,
        "unit": "" if unit == "1" else unit,
        "svg": Markup(svg),
        "legend": [(one.name, one.colour) for one in series] if len(series) > 1 else [],
        "last": number(series[0].points[-1][1]),
        "help": METRICS[lines[0][0]].help,
    }


def _sample(sample: Mapping[str, Json]) -> dict[str, str]:
    reward = sample.get("reward")
    return {
        "version": _text(sample.get("version")),
        "purpose": _text(sample.get("purpose")),
        "prompt": _text(sample.get("prompt")),
        "response": _text(sample.get("response")),
        "label": _text(sample.get("label")),
        "reward": number(reward) if isinstance(reward, int | float) else _text(sample.get("reward_state")),
        "finish": _text(sample.get("finish_reason")),
    }


def _text(value: Json) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return number(value)
    return json.dumps(value)

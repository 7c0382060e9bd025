"""`relax plot`: metrics over steps, of one run or of several beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import plotille

from relax.cli.folders import BadOption, existing_run, nearest
from relax.telemetry.charts import HEIGHT, WIDTH, Series, line_chart, number, thin_out
from relax.telemetry.metrics import METRICS, metric_named
from relax.telemetry.run_folder import RunFolderError

COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue", "white")
LINE_COLOURS = ("#0a7ea4", "#c76b00", "#8e44ad", "#2e8b57", "#c0392b", "#2c5aa0", "#555")
"""The same order in the terminal and in a file, where each has its own shades."""
STYLE = (
    "<style>svg { font: 11px sans-serif; background: #fff } .grid { stroke: #ddd } .tick, .legend { fill: #555 } "
    ".line { fill: none; stroke-width: 1.6 } .point { opacity: 0 } .point:hover, .lone { opacity: 1 } "
    + " ".join(
        f".line.c{n} {{ stroke: {shade} }} .point.c{n}, .t{n} {{ fill: {shade} }}"
        for n, shade in enumerate(LINE_COLOURS, 1)
    )
    + "</style>"
)
MARGIN = 24
"""Characters of a plot beside its dots: the ticks, and the name of the axis."""
ROW_HEIGHT = HEIGHT + 40
"""Of one metric's chart and its title in the SVG file."""

Records = Mapping[str, Sequence[Mapping[str, float]]]
"""Run -> its steps."""


def read_runs(run_dirs: Sequence[Path]) -> Records:
    """Raises `RunFolderError` for a folder without a run or without steps."""
    names = _names(run_dirs)
    runs = {}
    for name, path in zip(names, run_dirs, strict=True):
        records = existing_run(path).read_metrics()
        if not records:
            raise RunFolderError(f"{path}: no step was recorded in metrics.jsonl")
        runs[name] = records
    return runs


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    paths = [path.resolve() for path in run_dirs]
    if len(set(paths)) < len(paths):
        raise BadOption("a run folder is given twice")
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise BadOption("the run folders cannot be told apart by their names")


def series_of(runs: Records, metric: str) -> list[Series]:
    """A line per run that has the metric.

    Raises:
        BadOption: no run has it; names the nearest one that there is.
    """
    there = {name for records in runs.values() for record in records for name in record}
    if metric not in there:
        known = metric_named(metric) is not None
        words = "none of these runs recorded it" if known else "unknown metric"
        raise BadOption(f"{metric}: {words}; {nearest(metric, there)}")
    found = []
    for colour, (name, records) in enumerate(runs.items()):
        points = [(record["step"], record[metric]) for record in records if metric in record]
        if points:
            found.append(Series(name, points, colour % len(COLOURS) + 1))
    return found


def heading(metric: str, series: Sequence[Series]) -> str:
    lasts = "  ".join(f"{one.name} {number(one.points[-1][1])}" for one in series)
    return f"{metric}{_unit(metric)}   last: {lasts}"


def terminal_plot(metric: str, series: Sequence[Series], width: int, height: int, *, colours: bool) -> str:
    """Braille dots; the legend below where there are several lines."""
    figure = plotille.Figure()
    figure.width, figure.height = max(20, width - MARGIN), height
    figure.x_label, figure.y_label = "step", metric
    figure.with_colors = colours
    figure.origin = False
    figure.x_ticks_fkt = lambda low, high: number(round(low, 1))
    figure.y_ticks_fkt = lambda low, high: number(low)
    steps = [x for one in series for x, _ in one.points]
    figure.set_x_limits(min_=min(steps), max_=max(steps) if max(steps) > min(steps) else min(steps) + 1)
    for one in series:
        points = thin_out(one.points)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        colour = COLOURS[one.colour - 1] if colours else None
        figure.plot(xs, ys, lc=colour, label=one.name) if len(xs) > 1 else figure.scatter(xs, ys, lc=colour)
    shown = figure.show(legend=len(series) > 1)
    return f"{heading(metric, series)}\n{shown}"


def svg_page(charts: Mapping[str, Sequence[Series]]) -> str:
    """One SVG with a chart per metric, below each other; the legend has the colours of the lines."""
    parts = []
    for row, (metric, series) in enumerate(charts.items()):
        top = row * ROW_HEIGHT
        legend = "".join(
            f'<tspan dx="14" class="t{one.colour}">{escape(one.name)} {number(one.points[-1][1])}</tspan>'
            for one in series
        )
        parts.append(f'<text class="legend" x="8" y="{top + 20}">{escape(metric)}{_unit(metric)}{legend}</text>')
        parts.append(line_chart(metric, series).replace("<svg ", f'<svg y="{top + 28}" height="{HEIGHT}" ', 1))
    size = f'width="{WIDTH}" height="{len(charts) * ROW_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{STYLE}{"".join(parts)}</svg>\n'


def _unit(metric: str) -> str:
    known = METRICS.get(metric)
    return f" ({known.unit})" if known is not None and known.unit != "1" else ""

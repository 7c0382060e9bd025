"""Charts of the report as SVG text. Pure. Colours are CSS classes (c1, c2, ...) that the page defines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 28
MAX_POINTS = 300
"""Longer series are averaged in equal bins: more points than pixels only make the file large."""
TICKS = 4
TINY = 1e-100
"""Below it a number is drawn as 0: its logarithm would not survive the arithmetic."""
BAR_HEIGHT, BAR_GAP, BAR_LABEL = 22, 12, 92


@dataclass(frozen=True, slots=True)
class Series:
    """`points`: (step, value) with growing steps. `colour` numbers a class."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 1


def line_chart(title: str, series: Sequence[Series]) -> str:
    """An <svg> with axes, a line per series, and a tooltip on each point. Empty text without finite points."""
    lines = [Series(one.name, thin_out(_finite(one.points)), one.colour) for one in series]
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    ticks = nice_ticks(min(y for _, y in points), max(y for _, y in points), TICKS)
    low_y, high_y = ticks[0], ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        up = (y - low_y) / (high_y - low_y)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over steps">']
    for tick in ticks:
        _, y = at(low_x, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>')
    for step in dict.fromkeys([low_x, math.floor((low_x + high_x) / 2), high_x]):
        x, _ = at(step, low_y)
        anchor = "end" if step == high_x > low_x else "middle"  # a long last number would leave the frame
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="{anchor}">{number(step)}</text>')
    for line in lines:
        places = [at(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line c{line.colour}" points="{path}"/>')
        for (x, y), (step, value) in zip(places, line.points, strict=True):
            tip = f"step {number(step)}: {escape(line.name)} {number(value)}"
            shown = " lone" if len(places) == 1 else ""
            dot = f'<circle class="point c{line.colour}{shown}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
            parts.append(f"{dot}<title>{tip}</title></circle>")
    parts.append("</svg>")
    return "".join(parts)


def stacked_bars(rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, int]) -> str:
    """An <svg> with one bar per row, split by kind in the order of `colours`; every bar is 100 % wide.

    Rows without time are left out; empty text when none is left.
    """
    kept = {name: split for name, split in rows.items() if sum(split.get(kind, 0.0) for kind in colours) > 0}
    if not kept:
        return ""
    width = 2 * WIDTH
    span = width - BAR_LABEL - RIGHT
    height = len(kept) * (BAR_HEIGHT + BAR_GAP)
    label = "Where each role spent its time"
    parts = [f'<svg class="chart bars" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">']
    for index, (name, split) in enumerate(kept.items()):
        y = index * (BAR_HEIGHT + BAR_GAP)
        total = sum(split.get(kind, 0.0) for kind in colours)
        parts.append(f'<text class="label" x="0" y="{y + 15.5}">{escape(name)}</text>')
        x = float(BAR_LABEL)
        for kind, colour in colours.items():
            share = split.get(kind, 0.0) / total
            if share <= 0:
                continue
            tip = f"{escape(name)}: {escape(kind)} {number(split[kind])} s ({share:.0%})"
            # Two pixels of surface part the segments, so that they are told apart without their colours.
            parts.append(
                f'<rect class="bar c{colour}" x="{x:.1f}" y="{y}" width="{max(share * span - 2, 0.5):.1f}" '
                f'height="{BAR_HEIGHT}" rx="2"><title>{tip}</title></rect>'
            )
            if share > 0.07:
                middle = x + share * span / 2
                parts.append(
                    f'<text class="inbar" x="{middle:.1f}" y="{y + 15}" text-anchor="middle">{share:.0%}</text>'
                )
            x += share * span
    parts.append("</svg>")
    return "".join(parts)


def thin_out(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` points: the means of equal runs of neighbours, at the last step of each run."""
    run = math.ceil(len(points) / MAX_POINTS)
    if run <= 1:
        return list(points)
    runs = [points[begin : begin + run] for begin in range(0, len(points), run)]
    return [(part[-1][0], math.fsum(y for _, y in part) / len(part)) for part in runs]


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round values that enclose [low, high]; at least two, growing."""
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, TINY):
        half = 0.1 * size if size > TINY else 1.0
        low, high = low - half, high + half
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Short and readable: 1,234 / 12.3k / 0.0123 / 1.2e-06."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2g}"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:.3g}" if size < 100 else f"{value:.0f}"


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(y)]

"""The live view of a run: one screen that says what moves and who waits for whom."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

HEADLINE = (
    ("reward_mean", "reward", "{:.3f}"),
    ("accuracy_mean", "accuracy", "{:.3f}"),
    ("loss", "loss", "{:+.4f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("logprob_gap_max", "log-prob gap", "{:.1e}"),
    ("version_lag_max", "version lag", "{:.0f}"),
    ("tokens_per_s", "tokens/s", "{:.0f}"),
    ("step_s", "s/step", "{:.2f}"),
    ("bus_rows", "rows in bus", "{:.0f}"),
)
"""Metric, label, format."""

STATE_STYLE = {
    "running": "green",
    "active": "green",
    "done": "blue",
    "failed": "red",
    "lost": "red",
    "finished": "green",
}


def one_line(status: dict[str, Any]) -> str:
    """For output that is not a terminal."""
    metrics = status.get("metrics") or {}
    parts = [f"step {status['step']}/{status['steps']}"]
    parts += [f"{label} {fmt.format(metrics[name])}" for name, label, fmt in HEADLINE if name in metrics]
    return "  ".join(parts)


def view(status: dict[str, Any]) -> RenderableType:
    metrics = status.get("metrics") or {}
    numbers = Table.grid(padding=(0, 3))
    present = [(label, fmt.format(metrics[name])) for name, label, fmt in HEADLINE if name in metrics]
    for start in range(0, len(present), 5):
        cells = [Text.assemble((label + " ", "dim"), (value, "bold")) for label, value in present[start : start + 5]]
        numbers.add_row(*cells)

    roles = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("role", "state", "version", "waits for", "work", "restarts"):
        roles.add_column(column)
    for role in status.get("roles", []):
        split = role["time_split"]
        total = sum(split.values()) or 1.0
        roles.add_row(
            role["instance"],
            Text(role["state"], style=STATE_STYLE.get(role["state"], "yellow")),
            "" if role["version"] is None else str(role["version"]),
            role["waiting_for"],
            f"{100 * split.get('work_s', 0.0) / total:.0f} %",
            str(role["restarts"]) if role["restarts"] else "",
        )
    done = Table.grid(padding=(0, 2))
    done.add_row(
        f"step {status['step']}/{status['steps']}",
        ProgressBar(total=status["steps"], completed=status["step"], width=40),
        f"{status['wall_s']:.0f} s",
    )
    lines: list[RenderableType] = [done, numbers, roles]
    lines += [Text(sentence, style="bold red") for sentence in status.get("stalled", [])]
    lines += [
        Text(f"tracker {name}: {trouble}", style="yellow") for name, trouble in status.get("tracker_errors", {}).items()
    ]
    lines += [
        Text(f"{role['instance']}: {role['error'].splitlines()[-1]}", style="red")
        for role in status.get("roles", [])
        if role["error"]
    ]
    title = f"{status['run']}  {status['state']}" + (f": {status['reason']}" if status.get("reason") else "")
    return Panel(Group(*lines), title=title, title_align="left")

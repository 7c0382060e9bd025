"""Commands that look into run folders: `relax trace`, `relax samples`, `relax plot`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from relax.types import RelaxError

RunDir = Annotated[Path, typer.Argument(help="Run folder", show_default=False)]


def _fail(error: Exception) -> typer.Exit:
    from relax.cli.run import fail

    return typer.Exit(fail(Console(stderr=True), error))


def trace(
    run_dir: RunDir,
    steps: Annotated[str | None, typer.Option(help="Samples trained in these steps only, e.g. 3 or 3:5")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default trace.json in the run folder")] = None,
    sample: Annotated[str | None, typer.Option(help="Print the way of one sample instead, e.g. toy:0:7/3")] = None,
) -> None:
    """Write the way of samples through the roles as a file for ui.perfetto.dev or chrome://tracing."""
    from relax.cli.trace import sample_way, write_trace

    try:
        if sample is not None:
            Console().print(sample_way(run_dir, sample))
        else:
            print(write_trace(run_dir, steps, out))
    except RelaxError as error:
        raise _fail(error) from None


def samples(
    run_dir: RunDir,
    step: Annotated[str | None, typer.Option(help="Trained in this step, or in first:last")] = None,
    group: Annotated[str | None, typer.Option(help="Of this prompt group, e.g. toy:0:7")] = None,
    purpose: Annotated[str | None, typer.Option(help="train or eval")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Reward at least")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Reward at most")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Whose reward failed")] = False,
    sort: Annotated[
        str | None, typer.Option(help="reward, accuracy, version, step or length; -reward begins with the largest")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Samples to show; 0: all")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line per sample")] = False,
) -> None:
    """Browse generations with their rewards."""
    from relax.cli.folders import existing_run, known_name, step_range
    from relax.cli.samples import PURPOSES, Filters, read_samples, render, select

    try:
        filters = Filters(
            step_range(step) if step is not None else None,
            group,
            known_name("--purpose", purpose, PURPOSES),
            min_reward,
            max_reward,
            failed,
        )
        found, total = select(read_samples(existing_run(run_dir)), filters, sort, limit)
    except RelaxError as error:
        raise _fail(error) from None
    if as_json:
        for one in found:
            print(json.dumps(one))
    else:
        Console().print(render(found, total))


def plot(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run folders; several are compared", show_default=False)],
    metrics: Annotated[list[str], typer.Option("--metric", "-m", help="May be given several times")] = ["reward_mean"],  # noqa: B006 (typer reads the default)
    out: Annotated[Path | None, typer.Option(help="Write an SVG file instead")] = None,
    width: Annotated[int | None, typer.Option(min=40, help="Characters; default: of the terminal")] = None,
    height: Annotated[int, typer.Option(min=4, help="Lines of one plot")] = 12,
) -> None:
    """Plot metrics over steps in the terminal, or into an SVG file."""
    from relax.cli.folders import write_file
    from relax.cli.plot import read_runs, series_of, svg_page, terminal_plot

    console = Console()
    try:
        runs = read_runs(run_dirs)
        charts = {metric: series_of(runs, metric) for metric in metrics}
        if out is not None:
            write_file(out, svg_page(charts))
            print(out)
            return
    except RelaxError as error:
        raise _fail(error) from None
    for metric, series in charts.items():
        print(terminal_plot(metric, series, width or console.width, height, colours=console.is_terminal))
        print()

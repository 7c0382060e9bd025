"""`relax trace`: the spans of a run as one file for Perfetto, or the way of one sample as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from relax.cli.folders import existing_run, step_range, write_file
from relax.telemetry.chrome_trace import TraceError, chrome_trace, of_steps
from relax.telemetry.trace import Span, by_sample, read_spans


def write_trace(run_dir: Path, steps: str | None, out: Path | None) -> str:
    """What was written and where, in a sentence. Raises `RelaxError`."""
    existing_run(run_dir)
    spans, dropped = read_spans(run_dir)
    if steps is not None:
        spans = of_steps(spans, *step_range(steps))
    trace = chrome_trace(spans)
    path = run_dir / "trace.json" if out is None else out
    write_file(path, json.dumps(trace))
    lost = f"; {dropped} spans were dropped during the run" if dropped else ""
    return f"{path}: {len(spans)} spans of {len(by_sample(spans))} samples, for ui.perfetto.dev{lost}"


def sample_way(run_dir: Path, sample_id: str) -> Table:
    """One line per span of the sample. Raises `RelaxError`."""
    existing_run(run_dir)
    spans, _ = read_spans(run_dir)
    ways = by_sample(spans)
    if sample_id not in ways:
        example = f", e.g. {next(iter(ways))}" if ways else ""
        raise TraceError(f"no spans of sample '{sample_id}': {len(ways)} samples are traced{example}")
    return _table(ways[sample_id], sample_id)


def _table(way: Sequence[Span], sample_id: str) -> Table:
    table = Table(title=sample_id, title_justify="left")
    for column in ("span", "where", "begins (ms)", "takes (ms)", "facts"):
        table.add_column(column, justify="right" if "ms" in column else "left")
    zero_s = way[0].begin_s
    for span in way:
        table.add_row(
            span.name,
            span.instance,
            f"{(span.begin_s - zero_s) * 1e3:.1f}",
            f"{(span.end_s - span.begin_s) * 1e3:.1f}",
            "  ".join(f"{name} {value}" for name, value in span.facts.items()),
        )
    return table

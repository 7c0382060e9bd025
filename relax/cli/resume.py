"""`relax resume`: go on with a run from its newest complete checkpoint, in its own folder.

run_file.yaml ─ overrides ─▶ what changed, allowed or refused (relax/config/resume.py)
checkpoints   ─▶ the newest whole one: step c; torn ones are told and passed over
ledger        ─▶ trained through step t:   t = c  nothing to do
                                           t > c  back to c: what was trained later is open again
                                           t < c  the actor tells the ledger what the checkpoint knows
metrics.jsonl ─▶ cut at c                  then the services start, as `relax run` starts them
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from relax.checkpoint.manifest import CheckpointManifest
from relax.checkpoint.store import CheckpointStore
from relax.cli.folders import existing_run
from relax.cli.run import (
    RUN_FILE,
    ControlClient,
    Outcome,
    deploy_and_watch,
    end_by_signal,
    fail,
    remove_weights,
    report_outcome,
)
from relax.config.file import ConfigError, apply_override, load_document, parse_run_file
from relax.config.resume import Change, changes
from relax.config.sections import RunFile
from relax.telemetry.run_folder import RunFolder
from relax.types import PolicyVersion, RelaxError
from services.dcs.versions import FILE as VERSIONS
from services.dcs.versions import read_versions
from services.rollout.ledger import Ledger

CHECKPOINTS, LEDGER = "checkpoints", "ledger.sqlite"


class CannotResume(RelaxError):
    """The folder holds no run that can go on; says what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class Point:
    """`step`: of its newest complete checkpoint, 0 without one; `trained_through`: of its ledger."""

    step: int
    trained_through: int
    history: tuple[int, ...] = ()
    """Steps whose groups the checkpoint knows."""

    def missing_steps(self) -> list[int]:
        """Steps that are in the checkpoint and neither in the ledger nor in what the checkpoint can tell it."""
        return [step for step in range(self.trained_through + 1, self.step + 1) if step not in self.history]


def resume_file(run_dir: Path, file: Path | None, overrides: Sequence[str], *, address: str | None) -> int:
    """Go on with a run, print what comes of it, and return the exit code of `relax resume`."""
    console = Console()
    end_by_signal()
    run_dir = run_dir.absolute()
    try:
        folder = existing_run(run_dir)
        refuse_live(folder)
        after = changed_file(folder, file.absolute() if file else None, overrides)
        before = previous_config(folder)
        _tell_changes(changes(before, after.resolved()), console)
        point = point_of(run_dir, console)
        words = why_complete(point, before, after, _summary(folder))
        if words is not None:
            console.print(f"the run is complete: {words}; nothing was trained", style="green", markup=False)
            return 0
        outcome = _go_on(folder, after, point, address, console)
    except RelaxError as error:
        return fail(console, error)
    except KeyboardInterrupt:
        console.print("interrupted: everything was stopped", style="yellow")
        return 130
    report_outcome(outcome, run_dir, console)
    return outcome.exit_code


def _go_on(folder: RunFolder, file: RunFile, point: Point, address: str | None, console: Console) -> Outcome:
    from relax.cli.check import check

    for warning in check(file, check_port=address is not None, run_dir=folder.path).warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    remove_weights(file, folder.path)  # of a run whose machine, and so its guardian, was gone
    go_back(folder.path, point.step)
    lost = folder.cut_metrics(point.step)
    folder.summary_path.unlink(missing_ok=True)
    words = f"going on from step {point.step} of {file.run.steps}"
    again = max(point.trained_through, lost)
    if again > point.step:
        words += f"; steps {point.step + 1} to {again} are trained again"
    console.print(words, markup=False)
    return deploy_and_watch(
        file, folder.path, dashboard_url=address, token=os.environ.get("RAY_AUTH_TOKEN"), console=console
    )


# ------------------------------------------------------------------ what the folder holds


def refuse_live(folder: RunFolder) -> None:
    """Raises `CannotResume` while the run's controller answers."""
    url = folder.read_place().get("url")
    status = None if url is None else ControlClient(url).status(3.0)
    if status is not None and Path(status["run_dir"]) == folder.path:
        raise CannotResume(f"the run is still going, at {url}: end it by `relax stop {folder.path}` first")


def changed_file(folder: RunFolder, file: Path | None, overrides: Sequence[str]) -> RunFile:
    """The run file, as it was or as given now, with what is set now, over this folder.

    Relative paths in it mean what they meant at the start: this process goes to the folder that it was in then.
    """
    stored = folder.path / RUN_FILE
    if file is None and not stored.exists():
        raise CannotResume(f"{stored} is missing: the run was not started by `relax run`; give its run file by --file")
    document = load_document(file or stored)
    for override in overrides:
        apply_override(document, override)
    if not any(override.startswith("run.run_dir=") for override in overrides):
        apply_override(document, f"run.run_dir={json.dumps(str(folder.path))}")  # the folder may have been moved
    home = folder.read_place().get("home")
    if home is not None and Path(home).is_dir():
        os.chdir(home)
    return parse_run_file(document, str(file or stored))


def previous_config(folder: RunFolder) -> dict[str, Any]:
    """The configuration that the run had, over this folder."""
    stored = folder.path / RUN_FILE
    if stored.exists():
        config = parse_run_file(load_document(stored), str(stored)).resolved()
    else:
        config = folder.read_config()
    return {**config, "run": {**config["run"], "run_dir": str(folder.path)}}


def point_of(run_dir: Path, console: Console) -> Point:
    """Tells of torn checkpoints. Raises `CheckpointSchemaError`, `LedgerSchemaError`, `LedgerBusy`, `CannotResume`."""
    store = CheckpointStore(run_dir / CHECKPOINTS)
    found = store.restore_latest(
        lambda words: console.print(f"warning: {words}", style="yellow", markup=False, soft_wrap=True)
    )
    manifest: CheckpointManifest | None = None if found is None else found[0]
    if manifest is None:
        console.print("warning: no complete checkpoint: the run begins again at step 0", style="yellow", markup=False)
    path = run_dir / LEDGER
    if not path.exists():
        if manifest is None:
            return Point(0, 0)
        raise CannotResume(
            f"{path} is missing: without it nobody knows which prompts were trained; restore it beside the checkpoints"
        )
    with Ledger(path) as ledger:
        trained_through = ledger.trained_through
    if manifest is None:
        return Point(0, trained_through)
    point = Point(manifest.step, trained_through, tuple(step[0] for step in manifest.meta["history"]))
    if missing := point.missing_steps():
        raise CannotResume(
            f"{path} knows of training through step {trained_through}, and the checkpoint is of step {manifest.step}: "
            f"what steps {missing[0]} to {missing[-1]} trained is lost; restore the ledger that belongs to it, or move "
            f"{store.folder(manifest)} away to go on from an older checkpoint"
        )
    return point


def why_complete(point: Point, before: Mapping[str, Any], file: RunFile, summary: Mapping[str, Any]) -> str | None:
    """Why nothing is left to train; None when something is. `before`: the configuration that the run had."""
    if point.step >= file.run.steps:
        return f"{point.step} steps are trained, and run.steps is {file.run.steps}"
    epochs = file.rollout.data.epochs
    ended = summary.get("state") == "finished" and summary.get("steps") == point.step < before["run"]["steps"]
    if ended and epochs == before["rollout"]["data"]["epochs"]:
        return f"its data ended after step {point.step}, and rollout.data.epochs is {epochs}"
    return None


def go_back(run_dir: Path, to_step: int) -> None:
    """The ledger to the state after `to_step`: groups that were trained later are open again, in a new lineage, and are
    trained before any new prompt. Nothing changes where the ledger is not ahead."""
    path = run_dir / LEDGER
    if not path.exists():
        return
    with Ledger(path) as ledger:
        trained = ledger.trained_through
        if trained > to_step:
            newest = max((line.version for line in read_versions(run_dir / VERSIONS)), default=ledger.newest_version)
            ledger.start_lineage(to_step, PolicyVersion(max(newest, ledger.newest_version) + 1), trained)


def _tell_changes(found: Sequence[Change], console: Console) -> None:
    """Raises `ConfigError` with every change that is refused."""
    refused = [
        f"{change.key} cannot change when a run is resumed: {change}" for change in found if not change.rule.allowed
    ]
    if refused:
        raise ConfigError(refused)
    for change in found:
        console.print(f"changed: {change}", markup=False, soft_wrap=True)


def _summary(folder: RunFolder) -> dict[str, Any]:
    return folder.read_summary() if folder.summary_path.exists() else {}

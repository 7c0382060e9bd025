"""What survives the controller: which life of the run this is, its phase, and its account."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax.config.sections import ControllerArgs
from relax.control.runstate import RunState, RunStatus
from relax.telemetry.run_folder import RunFolder
from services.controller.book import RunBook
from services.controller.earlier import take_up_evals
from services.controller.store import Store

STATE_FILE = "state.json"
STORE_FILE = "controller.sqlite"
PHASE, ACCOUNT, LIFE, CONFIG = "phase", "account", "life", "config"


@dataclass(frozen=True, slots=True)
class Life:
    """A run on one Ray, from its deployment on. `began_s`: Unix seconds. `ended_at`: Serve's time of the deployment
    that ended, so that a later deployment into the same folder is told apart from a restart of the controller."""

    cluster: str
    began_s: float
    ended_at: float | None = None


def load_or_create_run_id(folder: Path) -> str:
    """One id for the life of a run folder, kept in it."""
    path = folder / STATE_FILE
    if path.exists():
        return str(json.loads(path.read_text())["run_id"])
    run_id = uuid.uuid4().hex[:12]
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"run_id": run_id}) + "\n")
    partial.rename(path)
    return run_id


def open_store(args: ControllerArgs, folder: RunFolder) -> Store:
    """Raises `StoreError`."""
    path = Path(args.controller.recovery.state_path).expanduser()
    return Store(folder.path / (path if args.controller.recovery.state_path else STORE_FILE))


@dataclass(slots=True)
class Kept:
    """What a controller finds when it comes up. `returned`: an earlier one of this life was here."""

    life: Life
    run: RunStatus
    config: dict[str, Any]
    returned: bool


def take_up(store: Store, book: RunBook, folder: RunFolder, cluster: str, deployed_at: float, now: float) -> Kept:
    """Fill the book from the store; where the run begins on another Ray, or anew, from its metrics and evaluations."""
    steps = folder.read_metrics()
    take_up_evals(book, folder)
    kept, phase = store.get(LIFE), store.get(PHASE)
    if kept is not None and phase is not None and kept["cluster"] == cluster:
        life = Life(**kept)
        run = RunStatus(RunState(phase["state"]), phase["reason"])
        if not run.ended or life.ended_at == deployed_at:
            book.restore(store.replicas(), store.get(ACCOUNT), steps, now)
            return Kept(life, run, store.get(CONFIG) or {}, returned=True)
    life = Life(cluster, time.time())
    store.begin_life(life=asdict(life), phase={"state": RunState.STARTING.value, "reason": ""})
    book.restore([], None, steps, now)
    return Kept(life, RunStatus(), {}, returned=False)


def save_phase(store: Store, run: RunStatus, life: Life) -> None:
    store.set(phase={"state": run.state.value, "reason": run.reason}, life=asdict(life))

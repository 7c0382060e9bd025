"""A checkpoint as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

from relax.checkpoint.store import CheckpointStore, reading
from relax.config.actor import ActorConfig
from relax.config.run import RunConfig
from relax.data.models import ensure_model
from relax.training.build import build_backend
from relax.training.state import POLICY, part_of, read_state
from relax.types import RelaxError


class ExportError(RelaxError):
    """The run folder has nothing to export, or the target is taken."""


def export_checkpoint(run_dir: Path, to: Path, step: int | None) -> Path:
    """Load the newest checkpoint (or that of `step`) with the run's own backend and export it to `to`."""
    config_path = run_dir / "config.json"
    if not config_path.exists():
        raise ExportError(f"{run_dir} is not a run folder: config.json is missing")
    if to.exists() and any(to.iterdir()):
        raise ExportError(f"{to} is not empty: choose a new folder")
    resolved = json.loads(config_path.read_text())
    run, actor = RunConfig.model_validate(resolved["run"]), ActorConfig.model_validate(resolved["actor"])
    store = CheckpointStore(run_dir / "checkpoints")
    manifests = [m for m in store.scan().whole if step is None or m.step == step]
    if not manifests:
        raise ExportError(f"{run_dir} has no complete checkpoint" + (f" of step {step}" if step is not None else ""))
    checkpoint = store.restore(manifests[-1])
    model = ensure_model(run.model, run_dir / "model", run.seed)
    backend = build_backend(
        actor, model, run.steps, run.seed, run.threads, trust_remote_code=run.model.trust_remote_code
    )
    try:
        with reading(checkpoint):
            backend.load_state(part_of(read_state(checkpoint), POLICY), str(checkpoint))
        backend.export(to)
    finally:
        backend.close()
    return to

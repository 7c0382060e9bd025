"""TensorBoard and Weights & Biases: sinks of the extra `trackers`, loaded only where they are configured."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from relax.config.roles import ControllerConfig, WandbConfig
from relax.telemetry.metrics import metric_named
from relax.telemetry.run_folder import RunFolder
from relax.telemetry.sinks import Sink, Tracker

TENSORBOARD, WANDB = "tensorboard", "wandb"
TAG_PREFIX = "relax/"
"""Puts all metrics into one section of TensorBoard."""


def missing_trackers(names: Iterable[str]) -> list[str]:
    """What is configured and not installed, each with what to do."""
    return [
        f"controller.trackers: {name} is not installed: pip install -c constraints.txt 'relax-rl[trackers]', "
        f"or leave it out"
        for name in names
        if importlib.util.find_spec(name) is None
    ]


def build_trackers(config: ControllerConfig, run: str, run_id: str, run_dir: Path) -> list[Tracker]:
    """One for each configured name; nothing is loaded before the first record."""
    makers: dict[str, Callable[[], Sink]] = {
        TENSORBOARD: lambda: TensorBoardSink(run_dir / TENSORBOARD),
        WANDB: lambda: WandbSink(config.wandb, run, run_id, run_dir),
    }
    return [Tracker(name, makers[name]) for name in dict.fromkeys(config.trackers)]


class TensorBoardSink:
    """One event file below `folder`. TensorBoard keeps float32: values are rounded to it."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder))

    def write(self, record: Mapping[str, float]) -> None:
        for name, value in record.items():
            metric = metric_named(name)
            description = "" if metric is None else f"{metric.help} ({metric.unit})"
            self._writer.add_scalar(TAG_PREFIX + name, value, int(record["step"]), description=description)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One W&B run of the run's own id. Offline it stays in the run folder; `wandb sync` sends it later."""

    def __init__(self, config: WandbConfig, run: str, run_id: str, run_dir: Path) -> None:
        folder = RunFolder(run_dir)
        # W&B reads these when it is loaded: nothing of it lies outside the run folder, and it calls nobody.
        os.environ.setdefault("WANDB_CACHE_DIR", str(run_dir / WANDB / "cache"))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb = wandb
        self._run: Any = wandb.init(
            mode=config.mode,
            project=config.project,
            name=run,
            id=run_id,
            dir=str(run_dir),
            config=folder.read_config() if folder.config_path.exists() else None,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
            ),
        )

    def write(self, record: Mapping[str, float]) -> None:
        self._run.log(dict(record), step=int(record["step"]))

    def close(self) -> None:
        """Also ends the service process that W&B started."""
        self._run.finish()
        self._wandb.teardown()

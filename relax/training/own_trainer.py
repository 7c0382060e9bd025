"""A user's own trainer in place of the built-in step: one class with one method."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from relax.config.actor import ActorConfig
from relax.config.run import RunConfig
from relax.plugins import PluginError, load_class, origin
from relax.training.base import Critic, StepResult, TrainBatch, TrainingBackend
from relax.training.batching import TrainRow, make_batches
from relax.training.step import StepOutcome, StepTrainer, Supply
from relax.types import PolicyVersion

LOSS, GRAD_NORM, LR = "loss", "grad_norm", "lr"
"""Metrics that every step has; 0 where an own trainer gives none."""


@dataclass(frozen=True, slots=True)
class TrainerContext:
    """What a trainer is built with. `backend` computes log-probs and makes updates from micro-batches and a loss."""

    run: RunConfig
    actor: ActorConfig
    backend: TrainingBackend
    critic: Critic | None

    def batches(self, rows: Sequence[TrainRow]) -> Iterator[TrainBatch]:
        """Padded micro-batches within actor.micro_batch_tokens."""
        return make_batches(rows, self.actor.micro_batch_tokens, share_prompts=self.actor.share_prompts)


class Trainer(Protocol):
    """Built once as `Trainer(context)`; `train` is called once per step, by one thread."""

    def __init__(self, context: TrainerContext) -> None: ...

    def train(self, trajectories: Sequence[TrainRow]) -> Mapping[str, float]:
        """Update the policy from all rows of a step; they carry rewards and no advantages.

        Returns metrics by name: those of the table (`relax.telemetry.metrics`), or own ones that begin with `own_`.
        Raises `NonFiniteUpdate` when nothing was changed (B45).
        """
        ...


class OwnTrainerStep:
    """Makes an own trainer look like the built-in step."""

    def __init__(self, trainer: Trainer, groups_per_step: int) -> None:
        self._trainer = trainer
        self._groups_per_step = groups_per_step

    def train(self, supply: Supply, step: int, version: PolicyVersion) -> StepOutcome | None:
        """As `StepTrainer.train`. Raises `PluginError` for metrics that are no finite numbers."""
        rows = [row for portion in supply(self._groups_per_step) for row in portion]
        if not rows:
            return None
        begin = time.perf_counter()
        metrics = dict(self._trainer.train(rows))
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise PluginError(f"the own trainer returned {name} = {value!r}, which is no finite number")
        result = StepResult(
            loss=float(metrics.pop(LOSS, 0.0)),
            grad_norm=float(metrics.pop(GRAD_NORM, 0.0)),
            lr=float(metrics.pop(LR, 0.0)),
            n_tokens=sum(int(row.loss_mask.sum()) for row in rows),
            n_rows=len(rows),
            stats={name: float(value) for name, value in metrics.items()},
            compute_s=time.perf_counter() - begin,
        )
        return StepOutcome(result, 1, 0)


def load_trainer(spec: str, base: Path | None) -> type[Trainer]:
    """The class that `actor.trainer` names by path. Raises `PluginError` that says what is missing, unless it can be
    built as `Trainer(context)` and has `train(self, trajectories)`."""
    found = load_class(spec, base)
    train = inspect.getattr_static(found, "train", None)
    if not callable(train):
        raise PluginError(f"trainer {found.__name__} in {origin(found)} has no `train(self, trajectories)`")
    for function, arguments in ((train, ("self", "trajectories")), (found, ("context",))):
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise PluginError(
                f"trainer {found.__name__} in {origin(found)}: {getattr(function, '__name__', function)}"
                f"{inspect.signature(function)} must take exactly ({', '.join(arguments)})"
            ) from error
    return found


def build_step(
    run: RunConfig, actor: ActorConfig, backend: TrainingBackend, critic: Critic | None, base: Path | None
) -> StepTrainer | OwnTrainerStep:
    """What trains a step: as `actor.algorithm` says, or the class that `actor.trainer` names."""
    if actor.trainer is None:
        return StepTrainer(run, actor, backend, critic, base)
    trainer = load_trainer(actor.trainer, base)(TrainerContext(run, actor, backend, critic))
    return OwnTrainerStep(trainer, run.groups_per_step)

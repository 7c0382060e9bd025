"""Watches a training step from the outside: of any trainer, algorithm or own loss, the micro-batches pass here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax.dump.record import BY_NAME, RowDump, Update
from relax.training.base import Critic, LossFn, LossOutput, StepResult, TrainBatch, TrainingBackend
from relax.training.state import TrainerState
from relax.types import Json

POLICY, CRITIC = "policy", "critic"

_COLUMNS = ("advantages", "proximal_logprobs", "values", "returns", "token_weights")
"""Of a batch: what the step computed before the loss."""


class Recorder:
    """Of one step. `rows`: row id -> computed field -> float32 [T]; of several passes over a row, the first."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.updates: list[Update] = []

    def watched(self, loss_fn: LossFn, who: str) -> LossFn:
        """The same loss, seen."""

        def loss(batch: TrainBatch, outputs: Tensor, entropy: Tensor) -> LossOutput:
            output = loss_fn(batch, outputs, entropy)
            columns = {name: column for name in _COLUMNS if (column := getattr(batch, name)) is not None}
            if who == POLICY:
                columns |= {"trainer_logprobs": outputs, "entropy": entropy}
                if output.terms is not None:
                    columns["loss_terms"] = output.terms
            self._add(batch, columns)
            return output

        return loss

    def updated(self, who: str, result: StepResult) -> None:
        self.updates.append(Update(who, result_numbers(result)))

    def _add(self, batch: TrainBatch, columns: Mapping[str, Tensor]) -> None:
        lengths = batch.attention_mask.sum(dim=1).tolist()
        for name, column in columns.items():
            array = column.detach().to(torch.float32).cpu().numpy()
            for row_id, length, line in zip(batch.row_ids, lengths, array, strict=True):
                self.rows.setdefault(row_id, {}).setdefault(name, line[:length].copy())


def with_computed(rows: Mapping[str, RowDump], recorder: Recorder) -> dict[str, RowDump]:
    """The rows with what `recorder` saw of them, in place of what they had."""
    out = {}
    for row_id, row in rows.items():
        kept = {name: value for name, value in row.values.items() if not BY_NAME[name].computed}
        out[row_id] = replace(row, values={**kept, **recorder.rows.get(row_id, {})})
    return out


def result_numbers(result: StepResult) -> dict[str, float]:
    """Without the time that it took."""
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "n_tokens": float(result.n_tokens),
        "n_rows": float(result.n_rows),
        **result.stats,
    }


class RecordingBackend:
    """A `TrainingBackend` that shows its updates to `recorder`, while there is one."""

    def __init__(self, inner: TrainingBackend) -> None:
        self._inner = inner
        self.recorder: Recorder | None = None

    def step(self, batches: Iterable[TrainBatch], loss_fn: LossFn) -> StepResult:
        if self.recorder is None:
            return self._inner.step(batches, loss_fn)
        result = self._inner.step(batches, self.recorder.watched(loss_fn, POLICY))
        self.recorder.updated(POLICY, result)
        return result

    def logprobs(self, tokens: Tensor, attention_mask: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        return self._inner.logprobs(tokens, attention_mask, temperature)

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._inner.state_tensors()

    def state(self) -> TrainerState:
        return self._inner.state()

    def load_state(self, saved: TrainerState, where: str) -> None:
        self._inner.load_state(saved, where)

    def save(self, folder: Path) -> None:
        self._inner.save(folder)

    def load(self, folder: Path) -> None:
        self._inner.load(folder)

    def export(self, folder: Path) -> None:
        self._inner.export(folder)

    def describe(self) -> Mapping[str, Json]:
        return self._inner.describe()

    def close(self) -> None:
        self._inner.close()


class RecordingCritic:
    """As `RecordingBackend`, of a critic."""

    def __init__(self, inner: Critic) -> None:
        self._inner = inner
        self.recorder: Recorder | None = None

    def step(self, batches: Iterable[TrainBatch], loss_fn: LossFn) -> StepResult:
        if self.recorder is None:
            return self._inner.step(batches, loss_fn)
        result = self._inner.step(batches, self.recorder.watched(loss_fn, CRITIC))
        self.recorder.updated(CRITIC, result)
        return result

    def values(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        return self._inner.values(tokens, wanted)

    def state(self) -> TrainerState:
        return self._inner.state()

    def load_state(self, saved: TrainerState, where: str) -> None:
        self._inner.load_state(saved, where)

    def save(self, folder: Path) -> None:
        self._inner.save(folder)

    def load(self, folder: Path) -> None:
        self._inner.load(folder)

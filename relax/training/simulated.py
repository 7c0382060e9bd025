"""Backend `simulated`: takes the time that a cluster's trainer would take, and learns nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from relax.config.run import RunConfig
from relax.simulation.engine import LOGPROB
from relax.simulation.turns import profile_of
from relax.training.base import LossFn, StepResult, TrainBatch
from relax.training.state import TrainerState, check_tensors, read_state, write_state
from relax.types import Json, ModelError

WEIGHTS = "simulated.updates"


class SimulatedBackend:
    """`TrainingBackend` whose weights are one tensor: it holds the number of updates, so every version has a digest of
    its own. The rows that it gets are real; their tokens decide how long a step takes."""

    def __init__(self, run: RunConfig) -> None:
        profile = profile_of(run)
        self._trainer, self._scale = profile.trainer, profile.time_scale
        self._gpus = profile.gpus - profile.rollout_gpus
        self._weights = torch.zeros(256)

    def logprobs(self, tokens: Tensor, attention_mask: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.full(tokens.shape, LOGPROB)
        logprobs[:, 0] = 0.0
        return logprobs, -logprobs

    def step(self, batches: Iterable[TrainBatch], loss_fn: LossFn) -> StepResult:
        spent_s, n_tokens, n_rows = 0.0, 0, 0
        for batch in batches:
            spent_s += self._spend(batch.n_tokens * self._trainer.token_gpu_s / self._gpus)
            n_tokens += batch.n_tokens
            n_rows += len(batch.tokens)
        if not n_rows:
            raise ValueError("a step needs at least one batch")
        spent_s += self._spend(self._trainer.update_s)
        self._weights += 1
        return StepResult(0.0, 0.0, 0.0, n_tokens, n_rows, {}, spent_s)

    def _spend(self, simulated_s: float) -> float:
        """Returns the seconds that it took here."""
        begin = time.perf_counter()
        time.sleep(simulated_s / self._scale)
        return time.perf_counter() - begin

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield WEIGHTS, self._weights

    def state(self) -> TrainerState:
        return TrainerState({WEIGHTS: self._weights}, {})

    def load_state(self, saved: TrainerState, where: str) -> None:
        check_tensors(saved, self.state(), where)
        self._weights.copy_(saved.tensors[WEIGHTS])

    def save(self, folder: Path) -> None:
        write_state(self.state(), folder)

    def load(self, folder: Path) -> None:
        self.load_state(read_state(folder), str(folder))

    def export(self, folder: Path) -> None:
        raise ModelError("a simulated trainer has no model to export")

    def describe(self) -> Mapping[str, Json]:
        return {"backend": "simulated", "updates": int(self._weights[0]), "time_scale": self._scale}

    def close(self) -> None:
        """There is nothing to free."""

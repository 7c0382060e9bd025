"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relax.training.base import LossOutput, TrainBatch


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Half the squared error to `batch.returns`, mean over the step's sampled tokens.

    With `clip` c the prediction may move at most c from the value before the step (`batch.values`), and the
    larger of the two errors counts (the value clipping of PPO's first implementation; Engstrom et al.,
    arXiv 2005.12729, section 3). Raises `ValueError` for a batch without returns or values.
    """

    clip: float | None

    def __call__(self, batch: TrainBatch, values: Tensor, _entropy: Tensor) -> LossOutput:
        if batch.returns is None or batch.values is None:
            raise ValueError("the critic's batch has no returns or values")
        mask = batch.loss_mask
        error = (values - batch.returns).square()
        clipped = torch.zeros_like(mask)
        if self.clip is not None:
            near = batch.values + (values - batch.values).clamp(-self.clip, self.clip)
            clipped_error = (near - batch.returns).square()
            clipped = clipped_error > error
            error = torch.maximum(error, clipped_error)
        n_tokens = float(batch.n_tokens)
        with torch.no_grad():
            returns = batch.returns[mask]
            stats = {
                "value_mean": (float(values[mask].sum()), n_tokens),
                "value_error": (float((batch.values[mask] - returns).square().sum()), n_tokens),
                "value_clip_fraction": (float(clipped[mask].sum()), n_tokens),
            }
        return LossOutput(0.5 * error[mask].sum(), n_tokens, stats)

"""Three sampled tokens in two rows, with numbers that can be followed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from relax.training.base import TrainBatch

MakeBatch = Callable[..., TrainBatch]


@pytest.fixture
def make_batch() -> MakeBatch:
    """Row A: prompt, A1, A2, advantage +1; row B: prompt, B1, padding, advantage -1. Arguments are probabilities."""

    def make(rollout: tuple[float, float, float], ref: tuple[float, float, float] | None = None) -> TrainBatch:
        mask = torch.tensor([[False, True, True], [False, True, False]])
        return TrainBatch(
            tokens=torch.zeros(2, 3, dtype=torch.int64),
            attention_mask=torch.tensor([[True, True, True], [True, True, False]]),
            loss_mask=mask,
            temperature=torch.ones(2),
            advantages=torch.tensor([[0.0, 1.0, 1.0], [0.0, -1.0, 0.0]]),
            rollout_logprobs=log_table(rollout),
            versions=torch.zeros(2, 3, dtype=torch.int32),
            ref_logprobs=None if ref is None else log_table(ref),
        )

    return make


def log_table(probs: tuple[float, float, float]) -> torch.Tensor:
    a1, a2, b1 = (math.log(p) for p in probs)
    return torch.tensor([[0.0, a1, a2], [0.0, b1, 0.0]])

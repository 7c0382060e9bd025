"""The worked example: policy probabilities A1 0.5, A2 0.3, B1 0.1; rollout 0.25, 0.3, 0.2; so the ratios are
2, 1 and 1/2 with advantages +1, +1 and -1."""

from __future__ import annotations

import math

import torch

from relax.algorithms import build_loss
from relax.config.algorithm import AlgorithmConfig
from relax.training.base import LossOutput, TrainBatch

POLICY = (0.5, 0.3, 0.1)
ROLLOUT = (0.25, 0.3, 0.2)
REF = (1.0, 0.3, 0.05)
SAMPLED = ((0, 1), (0, 2), (1, 1))


def log_table(probs: tuple[float, float, float]) -> torch.Tensor:
    a1, a2, b1 = (math.log(p) for p in probs)
    return torch.tensor([[0.0, a1, a2], [0.0, b1, 0.0]])


def make_batch(rollout: tuple[float, float, float], ref: tuple[float, float, float] | None = None) -> TrainBatch:
    """Row A: prompt, A1, A2, advantage +1; row B: prompt, B1, padding, advantage -1."""
    return TrainBatch(
        tokens=torch.zeros(2, 3, dtype=torch.int64),
        attention_mask=torch.tensor([[True, True, True], [True, True, False]]),
        loss_mask=torch.tensor([[False, True, True], [False, True, False]]),
        temperature=torch.ones(2),
        advantages=torch.tensor([[0.0, 1.0, 1.0], [0.0, -1.0, 0.0]]),
        rollout_logprobs=log_table(rollout),
        versions=torch.zeros(2, 3, dtype=torch.int32),
        ref_logprobs=None if ref is None else log_table(ref),
    )


def run(
    config: AlgorithmConfig, batch: TrainBatch, entropy: torch.Tensor | None = None
) -> tuple[LossOutput, list[float]]:
    """The output, and the gradient of loss_sum at A1, A2, B1."""
    logprobs = log_table(POLICY).requires_grad_()
    output = build_loss(config)(batch, logprobs, torch.zeros(2, 3) if entropy is None else entropy)
    output.loss_sum.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0, 0] == logprobs.grad[1, 0] == logprobs.grad[1, 2] == 0
    return output, [logprobs.grad[index].item() for index in SAMPLED]


def mean(output: LossOutput, name: str) -> float:
    total, count = output.stats[name]
    return total / count

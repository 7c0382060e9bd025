from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loss_example import ROLLOUT, make_batch

from relax.algorithms.value import ValueLoss
from relax.training.base import LossOutput, TrainBatch


def table(a1: float, a2: float, b1: float) -> torch.Tensor:
    return torch.tensor([[9.0, a1, a2], [9.0, b1, 9.0]])


def run(loss: ValueLoss, now: torch.Tensor, batch: TrainBatch) -> tuple[LossOutput, list[float]]:
    values = now.clone().requires_grad_()
    output = loss(batch, values, torch.zeros(2, 3))
    output.loss_sum.backward()
    assert values.grad is not None
    return output, [values.grad[0, 1].item(), values.grad[0, 2].item(), values.grad[1, 1].item()]


BATCH = replace(make_batch(ROLLOUT), values=table(0.5, 0.5, 0.0), returns=table(0.6, 0.6, 0.6))
NOW = table(1.0, 0.4, 0.65)


def test_value_loss_golden() -> None:
    """behaviour: B27. Errors 0.4, -0.2, 0.05: (0.16 + 0.04 + 0.0025) / 2 over 3 tokens."""
    output, gradient = run(ValueLoss(None), NOW, BATCH)
    assert output.loss_sum.item() == pytest.approx(0.10125, abs=1e-6)
    assert output.normaliser == 3
    assert gradient == pytest.approx([0.4, -0.2, 0.05], abs=1e-6)


def test_clipped_value_loss_golden() -> None:
    """behaviour: B27. B1 moved from 0 to 0.65: held at 0.2 its error is 0.16, which counts and has no slope.
    A1 at 0.7 would err less than unclipped, so it counts in full."""
    output, gradient = run(ValueLoss(0.2), NOW, BATCH)
    assert output.loss_sum.item() == pytest.approx((0.16 + 0.04 + 0.16) / 2, abs=1e-6)
    assert gradient == pytest.approx([0.4, -0.2, 0], abs=1e-6)
    total, count = output.stats["value_clip_fraction"]
    assert total / count == pytest.approx(1 / 3)


def test_a_batch_without_returns_is_refused() -> None:
    with pytest.raises(ValueError, match="no returns"):
        run(ValueLoss(None), NOW, make_batch(ROLLOUT))

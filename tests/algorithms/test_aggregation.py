from __future__ import annotations

import pytest
import torch

from relax.algorithms.aggregation import token_weights
from relax.config.algorithm import AlgorithmConfig

# Row A has losses 1 and 2, row B has 6, row C has no sampled token.
LOSSES = torch.tensor([[9.0, 1.0, 2.0], [9.0, 6.0, 9.0], [9.0, 9.0, 9.0]])
MASK = torch.tensor([[False, True, True], [False, True, False], [False, False, False]])


@pytest.mark.parametrize(
    ("config", "loss_sum", "normaliser"),
    [
        (AlgorithmConfig(aggregation="token_mean"), 9.0, 3.0),  # (1 + 2 + 6) / 3 tokens
        (AlgorithmConfig(aggregation="seq_mean"), 7.5, 2.0),  # (1.5 + 6) / 2 rows
        (AlgorithmConfig(aggregation="seq_sum_constant", aggregation_constant=4), 2.25, 2.0),  # (3/4 + 6/4) / 2 rows
    ],
)
def test_aggregations_golden(config: AlgorithmConfig, loss_sum: float, normaliser: float) -> None:
    """behaviour: B27. A row without sampled tokens counts nowhere."""
    weights, share = token_weights(MASK, config)
    assert (LOSSES * weights).sum().item() == pytest.approx(loss_sum)
    assert share == normaliser

"""From a loss per token to one number, as un-normalised sums.

An aggregation gives every token a weight that depends on its own row alone, and every batch its share of
the divisor. Sums over any micro-batching then equal the sum over the whole step (B25).
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax.config.algorithm import AlgorithmConfig


def token_weights(loss_mask: Tensor, config: AlgorithmConfig) -> tuple[Tensor, float]:
    """Weights float32 [R, T] (0 off the mask) and the batch's share of the divisor.

    A row is a sequence; one without sampled tokens counts in no divisor.
    - token_mean: 1 per token, divisor tokens (DAPO, arXiv 2503.14476, eq. 8);
    - seq_mean: 1 / tokens of the row, divisor rows (GRPO, arXiv 2402.03300, eq. 3);
    - seq_sum_constant: 1 / constant, divisor rows (Dr. GRPO, arXiv 2503.20783, appendix A).
    """
    mask = loss_mask.to(torch.float32)
    row_tokens = mask.sum(dim=1, keepdim=True)
    rows = float((row_tokens > 0).sum())
    match config.aggregation:
        case "token_mean":
            return mask, float(row_tokens.sum())
        case "seq_mean":
            return mask / row_tokens.clamp(min=1), rows
        case "seq_sum_constant":
            if config.aggregation_constant is None:
                raise ValueError("seq_sum_constant needs aggregation_constant")
            return mask / config.aggregation_constant, rows

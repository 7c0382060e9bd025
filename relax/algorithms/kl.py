"""Estimators of KL(policy || reference) from samples of the policy (joschu.net/blog/kl-approx.html).

With log r = ref - logprob: k1 = -log r (unbiased, signed), k2 = (log r)^2 / 2 (biased, its gradient is
right), k3 = r - 1 - log r (unbiased, never negative). As a term of the loss k1 has a gradient whose mean
is 0, so it regularises only as a term of the reward.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from relax.types import BoolArray, FloatArray

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(estimator: Estimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per token; any shape, with gradient through both arguments."""
    log_r = ref_logprobs - logprobs
    match estimator:
        case "k1":
            return -log_r
        case "k2":
            return log_r.square() / 2
        case "k3":
            return torch.expm1(log_r) - log_r


def sequence_kl(estimator: Estimator, logprobs: FloatArray, ref_logprobs: FloatArray, loss_mask: BoolArray) -> float:
    """Sum of the estimate over the tokens [T] where `loss_mask` is true."""
    policy = torch.tensor(logprobs[loss_mask], dtype=torch.float64)
    reference = torch.tensor(ref_logprobs[loss_mask], dtype=torch.float64)
    return float(kl_estimate(estimator, policy, reference).sum())

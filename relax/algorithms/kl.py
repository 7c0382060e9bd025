"""Estimators of KL(policy || reference) from samples of the policy (joschu.net/blog/kl-approx.html).

With log r = ref - logprob: k1 = -log r (unbiased, signed), k2 = (log r)^2 / 2 (biased, its gradient is
right), k3 = r - 1 - log r (unbiased, never negative). As a term of the loss k1 has a gradient whose mean
is 0, so it regularises only as a term of the reward.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from relax.types import FloatArray

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


def token_kl(estimator: Estimator, logprobs: FloatArray, ref_logprobs: FloatArray) -> FloatArray:
    """The estimate at each token; arrays of one shape, as the result."""
    policy, reference = torch.from_numpy(logprobs).double(), torch.from_numpy(ref_logprobs).double()
    estimate: FloatArray = kl_estimate(estimator, policy, reference).float().numpy()
    return estimate

"""KL divergences to a teacher over its most likely tokens."""

from __future__ import annotations

import torch
from torch import Tensor

TAIL_FLOOR = 1e-9
"""Least probability of what the top tokens leave over: rounding may make them sum to 1."""


def topk_kl(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """KL(p || q) [...] of two distributions given on K tokens [..., K], all other tokens taken as one.

    A lower bound of the KL over the whole vocabulary (log-sum inequality), and equal to it at K = vocabulary.
    With gradient to both.
    """
    on_tokens = (p_logprobs.exp() * (p_logprobs - q_logprobs)).sum(-1)
    p_tail, q_tail = _log_tail(p_logprobs), _log_tail(q_logprobs)
    return on_tokens + p_tail.exp() * (p_tail - q_tail)


def _log_tail(logprobs: Tensor) -> Tensor:
    return torch.log((1.0 - logprobs.exp().sum(-1)).clamp(min=TAIL_FLOOR))

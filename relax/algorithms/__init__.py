"""Algorithms as pure functions: advantages, losses, corrections, aggregation.

Torch is imported only where a tensor is needed, so that a process which only scores (rewards, length
penalty) loads this package without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax.algorithms.advantages import ScoredRow, compute_advantages
from relax.algorithms.mode import ModeMismatch, check_batch_mode
from relax.config.algorithm import AlgorithmConfig

if TYPE_CHECKING:
    from relax.training.base import LossFn

__all__ = ["ModeMismatch", "ScoredRow", "build_loss", "check_batch_mode", "compute_advantages", "needs_ref"]


def build_loss(config: AlgorithmConfig) -> LossFn:
    """The loss of one micro-batch; see `relax.algorithms.losses.PolicyLoss`."""
    from relax.algorithms.losses import PolicyLoss

    return PolicyLoss(config)


def needs_ref(config: AlgorithmConfig) -> bool:
    """Whether rows need `ref_logprobs`."""
    return config.kl.coef > 0

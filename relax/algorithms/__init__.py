"""Algorithms as pure functions: advantages, losses, corrections, aggregation.

Torch is imported only where a tensor is needed, so that a process which only scores (rewards, length
penalty) loads this package without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from relax.algorithms.advantages import Advantage, OwnAdvantage, ScoredRow, compute_advantages, own_advantage, whitened
from relax.algorithms.mode import ModeMismatch, check_batch_mode
from relax.config.algorithm import AlgorithmConfig

if TYPE_CHECKING:
    from relax.training.base import LossFn

__all__ = [
    "Advantage",
    "ModeMismatch",
    "OwnAdvantage",
    "ScoredRow",
    "build_loss",
    "check_batch_mode",
    "compute_advantages",
    "needs_proximal",
    "needs_ref",
    "needs_reward",
    "needs_step",
    "needs_values",
    "own_advantage",
    "teacher_columns",
    "whitened",
]


def build_loss(config: AlgorithmConfig, max_response_tokens: int | None = None, base: Path | None = None) -> LossFn:
    """The loss of one micro-batch, as `config.objective` says.

    `max_response_tokens`: default divisor of `seq_sum_constant`. `base`: folder that the path of an own loss
    counts from. Raises `PluginError` for an own loss that is not there.
    """
    if config.aggregation == "seq_sum_constant" and config.aggregation_constant is None and max_response_tokens:
        config = config.model_copy(update={"aggregation_constant": float(max_response_tokens)})
    match config.objective:
        case "policy":
            from relax.algorithms.losses import PolicyLoss

            return PolicyLoss(config)
        case "sft":
            from relax.algorithms.supervised import SupervisedLoss

            return SupervisedLoss(config)
        case "dpo":
            from relax.algorithms.supervised import PreferenceLoss

            return PreferenceLoss(config)
    from relax.plugins import load_function

    return load_function(config.objective, base)


def needs_ref(config: AlgorithmConfig) -> bool:
    """Whether rows need `ref_logprobs`."""
    return config.kl.coef > 0 or config.objective == "dpo"


def teacher_columns(config: AlgorithmConfig) -> tuple[str, ...]:
    """The fields of a teacher that rows need."""
    if config.distill.coef == 0:
        return ()
    if config.distill.form == "sampled":
        return ("teacher_logprobs",)
    return ("teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs")


def needs_reward(config: AlgorithmConfig) -> bool:
    """Whether rows are scored; an own loss is taken to read advantages."""
    return config.objective not in ("sft", "dpo")


def needs_values(config: AlgorithmConfig) -> bool:
    """Whether a critic's values are read."""
    return needs_reward(config) and config.advantage == "gae"


def needs_proximal(config: AlgorithmConfig) -> bool:
    """Whether the trainer's log-probs before the step's first update are read: they take one more forward.

    A step with a single update has them at hand: they are its own, without gradient.
    """
    if config.objective != "policy":
        return False
    reads = config.behaviour == "trainer" or config.correction.mask != "none"
    return config.m2_threshold is not None or (reads and config.updates_per_step > 1)


def needs_step(config: AlgorithmConfig, own: OwnAdvantage | None = None) -> bool:
    """Whether all rows of a step must be there before the first backward pass; otherwise they are streamed.

    With several updates they must be: a step that loses rows after its first update could not be discarded any more.
    """
    return (
        (config.whiten and needs_reward(config))
        or config.updates_per_step > 1
        or needs_proximal(config)
        or needs_values(config)
        or getattr(own, "needs", "group") == "step"
    )

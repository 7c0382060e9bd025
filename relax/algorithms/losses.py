"""The clipped policy-gradient loss with its corrections."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relax.algorithms.aggregation import token_weights
from relax.algorithms.kl import kl_estimate
from relax.config.algorithm import AlgorithmConfig
from relax.training.base import LossOutput, TrainBatch


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss per sampled token, summed by `config.aggregation`:

        - w x min(ratio x A, clip(ratio, 1 - clip_low, 1 + clip_high) x A)
        + kl.coef x KL(policy || reference)                (kl.place = loss)
        - entropy_coef x entropy

    Surrogate and KL: GRPO, arXiv 2402.03300, eq. 3; two clip bounds: DAPO, arXiv 2503.14476, eq. 8.
    behaviour `rollout`: ratio = exp(logprob - rollout_logprob) and w = 1.
    behaviour `trainer`: the denominator is the trainer's own log-prob before this step's single update, so
    the ratio is 1 in value and carries the gradient; w = min(p_trainer / p_rollout, tis.cap), detached
    (truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"), or 1 without a cap.

    Stats are (sum, count) over sampled tokens, except `policy_loss`, which is aggregated as the loss is, and
    `logprob_diff_max`. `logprob_diff_mean`, `logprob_diff_max` and `rollout_kl` (k3, samples of the rollout
    policy) compare trainer and rollout log-probs: engine gap and lag together.
    """

    config: AlgorithmConfig

    def __call__(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor) -> LossOutput:
        config, mask = self.config, batch.loss_mask
        log_gap = torch.where(mask, logprobs - batch.rollout_logprobs, 0.0)
        gap = log_gap.detach()
        if config.behaviour == "rollout":
            ratio, weight = log_gap.exp(), None
        else:
            ratio = (log_gap - gap).exp()
            weight = None if config.tis.cap is None else gap.exp().clamp(max=config.tis.cap)
        surrogate = _clipped(ratio, batch.advantages, config)
        policy_loss = -surrogate if weight is None else -surrogate * weight

        token_loss, kl = policy_loss, None
        if batch.ref_logprobs is not None:
            reference = torch.where(mask, batch.ref_logprobs, logprobs.detach())
            kl = kl_estimate(config.kl.estimator, logprobs, reference)
            if config.kl.coef > 0 and config.kl.place == "loss":
                token_loss = token_loss + config.kl.coef * kl
        elif config.kl.coef > 0 and config.kl.place == "loss":
            raise ValueError("the loss has a KL term, and the batch has no ref_logprobs")
        if config.entropy_coef != 0:
            token_loss = token_loss - config.entropy_coef * entropy

        weights, normaliser = token_weights(mask, config)
        loss_sum = (token_loss * weights).sum()
        with torch.no_grad():
            stats = _stats(batch, config, ratio, weight, gap, entropy, kl)
            stats["policy_loss"] = (float((policy_loss * weights).sum()), normaliser)
        return LossOutput(loss_sum, normaliser, stats)


def _clipped(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> Tensor:
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def _stats(
    batch: TrainBatch,
    config: AlgorithmConfig,
    ratio: Tensor,
    weight: Tensor | None,
    gap: Tensor,
    entropy: Tensor,
    kl: Tensor | None,
) -> dict[str, tuple[float, float]]:
    mask = batch.loss_mask
    ratio, gap = ratio[mask], gap[mask]
    n_tokens = float(gap.numel())
    if n_tokens == 0:
        return {}
    advantages = batch.advantages[mask]
    sums = {
        "entropy": entropy[mask].sum(),
        "ratio_mean": ratio.sum(),
        "clip_fraction_low": ((ratio < 1 - config.clip_low) & (advantages < 0)).sum(),
        "clip_fraction_high": ((ratio > 1 + config.clip_high) & (advantages > 0)).sum(),
        "logprob_diff_mean": gap.abs().sum(),
        "rollout_kl": (torch.expm1(gap) - gap).sum(),
        "logprob_diff_max": gap.abs().max(),
    }
    if kl is not None:
        sums["kl"] = kl[mask].sum()
    if weight is not None and config.tis.cap is not None:
        sums["tis_weight_mean"] = weight[mask].sum()
        sums["tis_truncated"] = (gap.exp() > config.tis.cap).sum()
    values = torch.stack([value.to(torch.float32) for value in sums.values()]).tolist()
    return {name: (value, 1.0 if name.endswith("_max") else n_tokens) for name, value in zip(sums, values, strict=True)}

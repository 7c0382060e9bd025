"""The policy loss: a surrogate, its corrections, the KL to the reference, and entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relax.algorithms.aggregation import token_weights
from relax.algorithms.distill import topk_kl
from relax.algorithms.kl import kl_estimate
from relax.algorithms.ratios import Correction, at_level, correction
from relax.algorithms.surrogates import surrogate
from relax.config.algorithm import AlgorithmConfig
from relax.training.base import LossOutput, TrainBatch


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss per sampled token, summed by `config.aggregation`:

        - w x surrogate(ratio, A)
        + kl.coef x KL(policy || reference)                (kl.place = loss)
        + distill.coef x top-k KL of policy and teacher    (distill.form = topk_*)
        - entropy_coef x entropy

    With pi the policy under training, pi_rollout what drew the token, and pi_proximal the trainer's policy
    before the step's first update (`batch.proximal_logprobs`; pi itself, without gradient, where a step has a
    single update and the batch carries none):

    - behaviour `rollout`: ratio = pi / pi_rollout;
    - behaviour `trainer`: ratio = pi / pi_proximal, and w corrects for pi_proximal / pi_rollout: decoupled PPO
      (AReaL, arXiv 2505.24298, eq. 5; Hilton et al., arXiv 2110.00641).

    w is the correction (`relax.algorithms.ratios`) times `batch.token_weights`.

    Stats are (sum, count) over sampled tokens, except `policy_loss`, which is aggregated as the loss is, and
    `logprob_diff_max`. `logprob_diff_mean`, `logprob_diff_max` and `rollout_kl` (k3, samples of the rollout
    policy) compare trainer and rollout log-probs: engine gap and lag together. `policy_kl` is the same over the
    tokens of earlier versions alone, and `stale_kv_gap` the mean |gap| of tokens that the trained version drew after
    others had begun their row: keys and values kept over a swap make it.
    """

    config: AlgorithmConfig

    def __call__(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor) -> LossOutput:
        config, mask = self.config, batch.loss_mask
        current = logprobs.detach()
        proximal = current if batch.proximal_logprobs is None else batch.proximal_logprobs
        behaviour = batch.rollout_logprobs if config.behaviour == "rollout" else proximal
        token_log_ratio = torch.where(mask, logprobs - behaviour, 0.0)
        log_ratio = at_level(token_log_ratio, mask, "token" if config.ratio == "token" else "geometric")
        log_rho = torch.where(mask, proximal - batch.rollout_logprobs, 0.0)
        corrected = correction(config.correction, log_rho, mask, batch.versions, batch.version)
        weight = corrected.weight if batch.token_weights is None else corrected.weight * batch.token_weights
        policy_loss = -weight * surrogate(config, log_ratio, logprobs, batch.advantages)

        token_loss, kl = policy_loss, None
        if batch.ref_logprobs is not None:
            reference = torch.where(mask, batch.ref_logprobs, current)
            kl = kl_estimate(config.kl.estimator, logprobs, reference)
            if config.kl.coef > 0 and config.kl.place == "loss":
                token_loss = token_loss + config.kl.coef * kl
        elif config.kl.coef > 0 and config.kl.place == "loss":
            raise ValueError("the loss has a KL term, and the batch has no ref_logprobs")
        distance = _teacher_kl(config, batch)
        if distance is not None and config.distill.coef > 0:
            token_loss = token_loss + config.distill.coef * distance
        if config.entropy_coef != 0:
            token_loss = token_loss - config.entropy_coef * entropy

        weights, normaliser = token_weights(mask, config)
        terms = token_loss * weights
        with torch.no_grad():
            gap = torch.where(mask, current - batch.rollout_logprobs, 0.0)
            stats = _stats(batch, config, log_ratio.detach().exp(), corrected, gap, entropy, kl)
            if batch.teacher_logprobs is not None:
                student_gap = (batch.rollout_logprobs - batch.teacher_logprobs)[mask]
                stats["teacher_kl"] = (float(student_gap.sum()), float(student_gap.numel()))
            if distance is not None:
                stats["teacher_topk_kl"] = (float(distance[mask].sum()), float(mask.sum()))
            stats["policy_loss"] = (float((policy_loss * weights).sum()), normaliser)
        return LossOutput(terms.sum(), normaliser, stats, terms.detach())


def _teacher_kl(config: AlgorithmConfig, batch: TrainBatch) -> Tensor | None:
    """[R, T], 0 off the mask: between the policy and its teacher over the teacher's most likely tokens."""
    if config.distill.form == "sampled":
        return None
    if batch.teacher_topk_logprobs is None or batch.topk_logprobs is None:
        raise ValueError(f"distill.form '{config.distill.form}' reads the teacher's top tokens; the batch has none")
    policy, teacher = batch.topk_logprobs, batch.teacher_topk_logprobs
    pair = (policy, teacher) if config.distill.form == "topk_reverse" else (teacher, policy)
    return torch.where(batch.loss_mask, topk_kl(*pair), 0.0)


def _stats(
    batch: TrainBatch,
    config: AlgorithmConfig,
    ratio: Tensor,
    corrected: Correction,
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
    k3 = torch.expm1(gap) - gap
    sums = {
        "entropy": entropy[mask].sum(),
        "ratio_mean": ratio.sum(),
        "logprob_diff_mean": gap.abs().sum(),
        "rollout_kl": k3.sum(),
        "logprob_diff_max": gap.abs().max(),
    }
    if config.surrogate in ("clip", "cispo"):
        outside_low, outside_high = ratio < 1 - config.clip_low, ratio > 1 + config.clip_high
        if config.surrogate == "clip":  # the other side is left open by the minimum
            outside_low, outside_high = outside_low & (advantages < 0), outside_high & (advantages > 0)
        sums["clip_fraction_low"], sums["clip_fraction_high"] = outside_low.sum(), outside_high.sum()
    if kl is not None:
        sums["kl"] = kl[mask].sum()
    if config.correction.weight != "none":
        sums["correction_weight_mean"] = corrected.weight[mask].sum()
        sums["correction_truncated"] = corrected.truncated[mask].sum()
    if config.correction.mask != "none" or config.correction.max_lag is not None:
        sums["correction_rejected"] = corrected.rejected[mask].sum()
    if batch.token_weights is not None:
        sums["m2_masked"] = (batch.token_weights[mask] == 0).sum()
    values = torch.stack([value.to(torch.float32) for value in sums.values()]).tolist()
    stats = {
        name: (value, 1.0 if name.endswith("_max") else n_tokens) for name, value in zip(sums, values, strict=True)
    }
    earlier = mask & (batch.versions < batch.version)
    if n_earlier := float(earlier.sum()):
        stats["policy_kl"] = (float(k3[earlier[mask]].sum()), n_earlier)
    kept = mask & (batch.versions == batch.version) & earlier.any(dim=1, keepdim=True)
    if n_kept := float(kept.sum()):
        stats["stale_kv_gap"] = (float(gap.abs()[kept[mask]].sum()), n_kept)
    return stats

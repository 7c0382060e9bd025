"""Probability ratios at the level of tokens and sequences, and what is done with those that are too far from 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax.config.algorithm import CorrectionConfig, Level
from relax.types import BoolArray, FloatArray, PolicyVersion

LOG_LIMIT = 20.0
"""Log ratios of whole sequences are kept within +-20 before `exp`: e^20 means "too far" as well as more would."""


def at_level(log_ratio: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Log ratio [R, T] (0 off the mask) of each token, or of its row spread over the row's tokens.

    `sequence`: the sum over the row's sampled tokens; `geometric`: their mean. Values off the mask mean nothing.
    """
    if level == "token":
        return log_ratio
    total = log_ratio.sum(dim=1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return total.clamp(-LOG_LIMIT, LOG_LIMIT).expand_as(log_ratio)


@dataclass(frozen=True, slots=True)
class Correction:
    """`weight` float32 [R, T], without gradient; the shares are bool [R, T] and counted over sampled tokens."""

    weight: Tensor
    truncated: Tensor
    rejected: Tensor


def correction(
    config: CorrectionConfig, log_rho: Tensor, mask: Tensor, versions: Tensor, version: PolicyVersion
) -> Correction:
    """The factor of each token's policy term. log_rho: log(p_proximal / p_rollout) [R, T], detached, 0 off the mask.

    Truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"), at the sequence level and with masks (Liu et al. 2025, "When Speed Kills Stability"); a token mask
    on both sides with a token weight is IcePop (Ling team 2025, "Small Leak Can Sink a Great Ship").
    """
    weight, truncated = torch.ones_like(log_rho), torch.zeros_like(mask)
    if config.weight != "none":
        weight = at_level(log_rho, mask, config.weight).exp()
        if config.cap is not None:
            truncated = weight > config.cap
            weight = weight.clamp(max=config.cap)
    rejected = torch.zeros_like(mask)
    if config.mask != "none":
        rho = at_level(log_rho, mask, config.mask).exp()
        rejected = (rho < config.mask_low) | (rho > config.mask_high)
    if config.max_lag is not None:
        rejected = rejected | (version - versions > config.max_lag)
    return Correction(weight.masked_fill(rejected, 0.0), truncated, rejected & mask)


def m2_masks(
    log_ratios: Mapping[str, FloatArray],
    advantages: Mapping[str, FloatArray],
    masks: Mapping[str, BoolArray],
    threshold: float,
) -> dict[str, FloatArray]:
    """Row id -> 1 for kept and 0 for masked tokens, float32 [T]: M2PO, arXiv 2510.01161, section 4.

    Over all sampled tokens of one step, the mean of (log ratio)^2 is brought to at most `threshold` by masking
    the largest first. As in the clip of PPO, only tokens whose update would lead further away can be masked:
    advantage and log ratio of one sign; the others count in the mean and stay. The inputs are those of whole
    rows [T], so that the result does not depend on micro-batches (B25).
    """
    ids = list(log_ratios)
    mask = _joined([masks[i] for i in ids]).astype(bool)
    squares = _joined([log_ratios[i] for i in ids]).astype(np.float64)[mask]
    outward = (_joined([advantages[i] for i in ids])[mask] * _joined([log_ratios[i] for i in ids])[mask]) > 0
    squares *= squares
    kept = np.ones(len(squares), np.float32)
    total, count = squares.sum(), len(squares)
    candidates = np.flatnonzero(outward)
    for index in candidates[np.argsort(-squares[candidates], kind="stable")]:
        if total <= threshold * count:
            break
        kept[index] = 0.0
        total -= squares[index]
        count -= 1
    flat = np.zeros(len(mask), np.float32)
    flat[mask] = kept
    ends = np.cumsum([len(masks[i]) for i in ids])[:-1]
    return dict(zip(ids, np.split(flat, ends), strict=True))


def _joined(arrays: Sequence[FloatArray | BoolArray]) -> np.ndarray:
    return np.concatenate(arrays)

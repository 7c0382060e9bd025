"""The policy term per token: what is maximised, before weights and aggregation."""

from __future__ import annotations

import torch
from torch import Tensor

from relax.config.algorithm import AlgorithmConfig


def surrogate(config: AlgorithmConfig, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """float32 [R, T] with gradient. log_ratio: log(p / p_behaviour) at the level of `config.ratio`.

    - clip: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347, eq. 7; two bounds: DAPO,
      arXiv 2503.14476, eq. 8), with `dual_clip` c at least c A where A < 0 (arXiv 1912.09729, eq. 5);
    - cispo: clip(r), without gradient, x A x log p (arXiv 2506.13585, eq. 4 and 5);
    - sapo: sigmoid(tau (r - 1)) x 4 / tau x A, tau by the sign of A (arXiv 2511.20347, eq. 5 and 6);
    - ratio: r A, and reinforce: A log p.
    """
    if config.surrogate == "reinforce":
        return advantages * logprobs
    ratio = log_ratio.exp()
    match config.surrogate:
        case "clip":
            clipped = torch.minimum(ratio * advantages, clip(config, ratio) * advantages)
            if config.dual_clip is not None:
                floor = config.dual_clip * advantages
                clipped = torch.where(advantages < 0, torch.maximum(clipped, floor), clipped)
            return clipped
        case "cispo":
            return clip(config, ratio).detach() * advantages * logprobs
        case "sapo":
            tau = torch.where(advantages > 0, config.sapo.tau_positive, config.sapo.tau_negative)
            return torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages
        case "ratio":
            return ratio * advantages


def clip(config: AlgorithmConfig, ratio: Tensor) -> Tensor:
    return ratio.clamp(1 - config.clip_low, 1 + config.clip_high)

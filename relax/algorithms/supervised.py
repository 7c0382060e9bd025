"""Losses over given responses: supervised fine-tuning and direct preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from relax.algorithms.aggregation import token_weights
from relax.config.algorithm import AlgorithmConfig
from relax.training.base import LossOutput, TrainBatch
from relax.types import group_of

CHOSEN, REJECTED = 0, 1
"""Member k of a preference group."""


@dataclass(frozen=True, slots=True)
class SupervisedLoss:
    """Cross-entropy over the response tokens (`loss_mask`), summed by `config.aggregation`."""

    config: AlgorithmConfig

    def __call__(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor) -> LossOutput:
        weights, normaliser = token_weights(batch.loss_mask, self.config)
        n_tokens = float(batch.n_tokens)
        stats = {
            "nll": (-float(logprobs.detach()[batch.loss_mask].sum()), n_tokens),
            "entropy": (float(entropy.detach()[batch.loss_mask].sum()), n_tokens),
        }
        terms = -(logprobs * weights)
        return LossOutput(terms.sum(), normaliser, stats, terms.detach())


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """DPO, arXiv 2305.18290, eq. 7, mean over pairs: - log sigmoid(m), with the margin

        m = beta x [(log pi - log ref)(chosen) - (log pi - log ref)(rejected)], summed over response tokens;

    label smoothing e: - (1 - e) log sigmoid(m) - e log sigmoid(-m) (conservative DPO, Mitchell 2023).

    A pair is the members k = 0 (chosen) and k = 1 (rejected) of one group, and must be in one batch. Raises
    `ValueError` for a row without its partner and for missing `ref_logprobs`.
    """

    config: AlgorithmConfig

    def __call__(self, batch: TrainBatch, logprobs: Tensor, _entropy: Tensor) -> LossOutput:
        if batch.ref_logprobs is None:
            raise ValueError("DPO compares with the reference, and the batch has no ref_logprobs")
        chosen, rejected = _pairs(batch.row_ids)
        gain = torch.where(batch.loss_mask, logprobs - batch.ref_logprobs, 0.0).sum(dim=1)
        margin = self.config.dpo.beta * (gain[chosen] - gain[rejected])
        smoothing = self.config.dpo.label_smoothing
        loss = -(1 - smoothing) * functional.logsigmoid(margin) - smoothing * functional.logsigmoid(-margin)
        count = float(len(chosen))
        with torch.no_grad():
            stats = {
                "preference_accuracy": (float((margin > 0).sum()), count),
                "preference_margin": (float(margin.sum()), count),
            }
        return LossOutput(loss.sum(), count, stats)


def _pairs(row_ids: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Indices of the chosen and of the rejected row of each group."""
    found: dict[str, dict[int, int]] = {}
    for index, row_id in enumerate(row_ids):
        found.setdefault(group_of(row_id), {})[int(row_id.split("/")[1])] = index
    for group, members in found.items():
        if set(members) != {CHOSEN, REJECTED}:
            raise ValueError(f"group {group} is no pair in its batch: members {sorted(members)}, 0 and 1 are needed")
    return [m[CHOSEN] for m in found.values()], [m[REJECTED] for m in found.values()]

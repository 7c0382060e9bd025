"""Group-relative advantages. Rewards are keyed by group id, never by position (B26)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax.config.algorithm import AlgorithmConfig
from relax.types import BoolArray, FloatArray, GroupId, SampleId, group_of

STD_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One training row and the reward of its sample; rows of one sample carry the same reward.

    The arrays (bool or float32 [T]) are read only when the KL is placed in the reward.
    """

    row_id: str
    reward: float
    loss_mask: BoolArray | None = None
    rollout_logprobs: FloatArray | None = None
    ref_logprobs: FloatArray | None = None

    @property
    def group_id(self) -> GroupId:
        return group_of(self.row_id)

    @property
    def sample_id(self) -> SampleId:
        return SampleId(self.row_id.rsplit("/", 1)[0])


def group_mean_std(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-6) over the members of one group that are there.

    GRPO, arXiv 2402.03300, section 4.1.2. The paper does not say which std; this is the unbiased one
    (n - 1), as `torch.std` and with it the common implementations. Equal rewards, or a single one, give 0.
    """
    centred = group_mean(rewards)
    if not any(centred):
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + STD_EPS) for c in centred]


def group_mean(rewards: Sequence[float]) -> list[float]:
    """r - mean over the members of one group that are there (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    # The rounding error of a mean of equal numbers, divided by a std of about 0, would look like a signal.
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


_ADVANTAGES = {"group_mean_std": group_mean_std, "group_mean": group_mean}


def compute_advantages(config: AlgorithmConfig, rows: Sequence[ScoredRow]) -> dict[str, float]:
    """Row id -> advantage of all its tokens.

    `rows` holds every row of the groups it touches, in any order; members may be missing and groups
    unequal. A sample counts once in its group however many rows it was split into. With the KL placed
    in the reward, coef x sum over the sample's sampled tokens of the estimate at the rollout log-probs
    is subtracted from the reward first. Raises `ValueError` for a non-finite reward, for rows of one
    sample that disagree, for a repeated row, or for missing `ref_logprobs`.
    """
    rewards = _sample_rewards(rows)
    if config.kl.place == "reward" and config.kl.coef > 0:
        for row in rows:
            rewards[row.sample_id] -= config.kl.coef * _row_kl(config, row)
    advantages = _by_group(config, rewards)
    return {row.row_id: advantages[row.sample_id] for row in rows}


def _sample_rewards(rows: Sequence[ScoredRow]) -> dict[SampleId, float]:
    if len({row.row_id for row in rows}) != len(rows):
        raise ValueError("a row id occurs twice")
    rewards: dict[SampleId, float] = {}
    for row in rows:
        if not math.isfinite(row.reward):
            raise ValueError(f"row {row.row_id}: reward is {row.reward}")
        if rewards.setdefault(row.sample_id, row.reward) != row.reward:
            raise ValueError(f"rows of sample {row.sample_id} carry different rewards")
    return rewards


def _by_group(config: AlgorithmConfig, rewards: Mapping[SampleId, float]) -> dict[SampleId, float]:
    groups: dict[GroupId, list[SampleId]] = defaultdict(list)
    for sample_id in rewards:
        groups[group_of(sample_id)].append(sample_id)
    advantage = _ADVANTAGES[config.advantage]
    out: dict[SampleId, float] = {}
    for members in groups.values():
        out.update(zip(members, advantage([rewards[m] for m in members]), strict=True))
    return out


def _row_kl(config: AlgorithmConfig, row: ScoredRow) -> float:
    from relax.algorithms.kl import sequence_kl

    if row.loss_mask is None or row.rollout_logprobs is None or row.ref_logprobs is None:
        raise ValueError(f"row {row.row_id}: a KL in the reward needs loss_mask, rollout_logprobs and ref_logprobs")
    return sequence_kl(config.kl.estimator, row.rollout_logprobs, row.ref_logprobs, row.loss_mask)

"""Advantages per sampled token. Rewards are keyed by group id, never by position (B26)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relax.algorithms.returns import gae, returns_to_go
from relax.config.algorithm import AlgorithmConfig
from relax.types import BoolArray, FloatArray, GroupId, RelaxError, SampleId, group_of

STD_EPS = 1e-6
WHITEN_EPS = 1e-8


class AdvantageError(RelaxError, ValueError):
    """An own advantage function returned something else than one finite number or array per row."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRow:
    """One training row of T tokens and the reward of its sample; rows of one sample carry the same reward.

    loss_mask: bool [T]. float32 [T], aligned as in `TrainBatch`: rollout_logprobs and ref_logprobs are read
    when the KL is placed in the reward, values (of the critic) by `gae`, teacher_logprobs by distillation.
    """

    row_id: str
    reward: float
    loss_mask: BoolArray
    rollout_logprobs: FloatArray | None = None
    ref_logprobs: FloatArray | None = None
    values: FloatArray | None = None
    teacher_logprobs: FloatArray | None = None

    @property
    def group_id(self) -> GroupId:
        return group_of(self.row_id)

    @property
    def sample_id(self) -> SampleId:
        return SampleId(self.row_id.rsplit("/", 1)[0])


@dataclass(frozen=True, slots=True, eq=False)
class Advantage:
    """Of one row, float32 [T] each and 0 off the loss mask; `returns` (the critic's target) with `gae` alone."""

    advantages: FloatArray
    returns: FloatArray | None = None


OwnAdvantage = Callable[[Sequence[ScoredRow]], Mapping[str, float | FloatArray]]
"""An own function: the rows of whole groups -> row id -> the advantage of all its tokens, or of each [T].

With the attribute `needs = "step"` it gets all rows of a step at once; otherwise any whole groups.
"""


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


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r - mean of the other members (RLOO, arXiv 2402.14740); a single member gets 0."""
    if len(rewards) == 1:
        return [0.0]
    return [c * len(rewards) / (len(rewards) - 1) for c in group_mean(rewards)]


_GROUP_ADVANTAGES: Mapping[str, Callable[[Sequence[float]], list[float]]] = {
    "group_mean_std": group_mean_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "reward": list,
    "none": lambda rewards: [0.0] * len(rewards),
}


def own_advantage(config: AlgorithmConfig, base: Path | None = None) -> OwnAdvantage | None:
    """The function that `config.advantage` names by path. Raises `PluginError` for one that is not there."""
    if ":" not in config.advantage:
        return None
    from relax.plugins import load_function

    return load_function(config.advantage, base)


def compute_advantages(
    config: AlgorithmConfig, rows: Sequence[ScoredRow], own: OwnAdvantage | None = None
) -> dict[str, Advantage]:
    """Row id -> its advantages, not whitened (`whitened` does that, over the step).

    With distillation of form `sampled`, distill.coef x (log p_teacher - log p_rollout) of each sampled token is
    added: the gradient of its expectation is that of - KL(student || teacher), token by token (on-policy
    distillation: Agarwal et al., arXiv 2306.13649; as a reward: Gu et al., arXiv 2306.08543, eq. 4).

    `rows` holds every row of the groups it touches, in any order; members may be missing and groups unequal.
    A sample counts once in its group however many rows it was split into. With the KL placed in the reward,
    coef x the estimate at the rollout log-probs is subtracted: from the reward, summed over the sample's
    sampled tokens, where a sample has one advantage; token by token with `return_to_go` and `gae`.
    Raises `ValueError` for a non-finite reward, for rows of one sample that disagree, for a repeated row,
    or for missing `ref_logprobs` or `values`; `AdvantageError` for what an own function returned.
    """
    found = _from_own(own(rows), rows) if own is not None else _from_rewards(config, rows)
    if config.distill.coef > 0 and config.distill.form == "sampled":
        return {row.row_id: _distilled(config, row, found[row.row_id]) for row in rows}
    return found


def _from_rewards(config: AlgorithmConfig, rows: Sequence[ScoredRow]) -> dict[str, Advantage]:
    rewards = _sample_rewards(rows)
    penalties = {row.row_id: _kl_penalty(config, row) for row in rows} if _kl_in_reward(config) else {}
    if config.advantage in ("return_to_go", "gae"):
        return {row.row_id: _by_token(config, row, penalties.get(row.row_id)) for row in rows}
    for row in rows:
        if row.row_id in penalties:
            rewards[row.sample_id] -= float(penalties[row.row_id].sum(dtype=np.float64))
    values = _by_group(_GROUP_ADVANTAGES[config.advantage], rewards)
    return {row.row_id: Advantage(_on_mask(values[row.sample_id], row)) for row in rows}


def whitened(advantages: Mapping[str, Advantage], masks: Mapping[str, BoolArray]) -> dict[str, Advantage]:
    """Mean 0 and variance 1 over all sampled tokens of the rows given: those of one step (B25).

    (a - mean) / sqrt(variance + 1e-8), population variance; REINFORCE++, arXiv 2501.03262, section 3. Equal
    advantages become 0. `returns` stay as they are.
    """
    tokens = np.concatenate([a.advantages[masks[row_id]] for row_id, a in advantages.items()]).astype(np.float64)
    mean, std = tokens.mean(), math.sqrt(tokens.var() + WHITEN_EPS)
    if tokens.min() == tokens.max():
        mean, std = tokens[0], 1.0
    return {
        row_id: Advantage(np.where(masks[row_id], (a.advantages - mean) / std, 0.0).astype(np.float32), a.returns)
        for row_id, a in advantages.items()
    }


def _distilled(config: AlgorithmConfig, row: ScoredRow, advantage: Advantage) -> Advantage:
    if row.teacher_logprobs is None or row.rollout_logprobs is None:
        raise ValueError(f"row {row.row_id}: distillation needs teacher_logprobs and rollout_logprobs")
    pull = np.where(row.loss_mask, config.distill.coef * (row.teacher_logprobs - row.rollout_logprobs), 0.0)
    return Advantage((advantage.advantages + pull).astype(np.float32), advantage.returns)


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


def _by_group(
    advantage: Callable[[Sequence[float]], list[float]], rewards: Mapping[SampleId, float]
) -> dict[SampleId, float]:
    groups: dict[GroupId, list[SampleId]] = defaultdict(list)
    for sample_id in rewards:
        groups[group_of(sample_id)].append(sample_id)
    out: dict[SampleId, float] = {}
    for members in groups.values():
        out.update(zip(members, advantage([rewards[m] for m in members]), strict=True))
    return out


def _by_token(config: AlgorithmConfig, row: ScoredRow, penalty: FloatArray | None) -> Advantage:
    """The reward falls on the row's last sampled token, the KL penalty on each."""
    rewards = np.zeros(int(row.loss_mask.sum()), np.float64)
    if penalty is not None:
        rewards -= penalty[row.loss_mask]
    rewards[-1] += row.reward
    if config.advantage == "return_to_go":
        return Advantage(_spread(returns_to_go(rewards, config.gae.gamma), row))
    if row.values is None:
        raise ValueError(f"row {row.row_id}: advantage 'gae' needs the critic's values")
    advantages, returns = gae(rewards, row.values[row.loss_mask], config.gae.gamma, config.gae.lam)
    return Advantage(_spread(advantages, row), _spread(returns, row))


def _spread(values: np.ndarray[tuple[int], np.dtype[np.float64]], row: ScoredRow) -> FloatArray:
    out = np.zeros(len(row.loss_mask), np.float32)
    out[row.loss_mask] = values
    return out


def _on_mask(value: float, row: ScoredRow) -> FloatArray:
    return np.where(row.loss_mask, value, 0.0).astype(np.float32)


def _from_own(returned: Mapping[str, float | FloatArray], rows: Sequence[ScoredRow]) -> dict[str, Advantage]:
    out = {}
    for row in rows:
        if row.row_id not in returned:
            raise AdvantageError(f"the own advantage function returned nothing for row {row.row_id}")
        value = np.asarray(returned[row.row_id], np.float32)
        if value.shape not in ((), row.loss_mask.shape) or not np.isfinite(value).all():
            raise AdvantageError(
                f"the own advantage function returned shape {value.shape} for row {row.row_id} of "
                f"{len(row.loss_mask)} tokens, or a number that is not finite: one number or one per token is needed"
            )
        out[row.row_id] = Advantage(np.where(row.loss_mask, value, 0.0).astype(np.float32))
    return out


def _kl_in_reward(config: AlgorithmConfig) -> bool:
    return config.kl.place == "reward" and config.kl.coef > 0


def _kl_penalty(config: AlgorithmConfig, row: ScoredRow) -> FloatArray:
    """coef x estimate per token, float32 [T], 0 off the mask."""
    from relax.algorithms.kl import token_kl

    if row.rollout_logprobs is None or row.ref_logprobs is None:
        raise ValueError(f"row {row.row_id}: a KL in the reward needs rollout_logprobs and ref_logprobs")
    kl = token_kl(config.kl.estimator, row.rollout_logprobs, row.ref_logprobs)
    return np.where(row.loss_mask, config.kl.coef * kl, 0.0).astype(np.float32)

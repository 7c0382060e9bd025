"""From leased rows to training rows, and what a step's record says of them. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bus.records import Lease
from relax.algorithms import check_batch_mode, needs_ref, needs_reward, teacher_columns
from relax.config.algorithm import AlgorithmConfig
from relax.training.batching import TrainRow
from relax.types import NO_VERSION, SamplingParams


def actor_fields(config: AlgorithmConfig) -> tuple[str, ...]:
    """Fields that a row must have before it is trained."""
    fields: tuple[str, ...] = ("tokens", "loss_mask", "rollout_logprobs", "versions", "sampling")
    if needs_reward(config):
        fields = (*fields, "reward", "accuracy")
    if needs_ref(config):
        fields = (*fields, "ref_logprobs")
    return (*fields, *teacher_columns(config))


def train_rows(lease: Lease, config: AlgorithmConfig) -> list[TrainRow]:
    """The rows of a lease, without advantages. Raises `ModeMismatch` (B7)."""
    sampling = {row.row_id: SamplingParams.from_json(row.json("sampling")) for row in lease.rows}
    check_batch_mode(sampling.items())
    with_ref, with_reward = needs_ref(config), needs_reward(config)
    return [
        TrainRow(
            row_id=row.row_id,
            tokens=row.array("tokens"),
            loss_mask=row.array("loss_mask"),
            rollout_logprobs=row.array("rollout_logprobs"),
            versions=row.array("versions"),
            temperature=sampling[row.row_id].temperature,
            reward=float(row.array("reward")) if with_reward else 0.0,
            ref_logprobs=row.array("ref_logprobs") if with_ref else None,
            **{name: row.array(name) for name in teacher_columns(config)},
        )
        for row in lease.rows
    ]


def in_order(lease: Lease, rows: Sequence[TrainRow]) -> list[tuple[tuple[int, int, int], TrainRow]]:
    """Each row with its place in the run (seq of its group, k, segment), whenever it came. `rows` are the lease's."""
    seq = {group.group_id: group.seq for group in lease.groups}
    return [((seq[at.group_id], at.k, at.segment), row) for at, row in zip(lease.rows, rows, strict=True)]


@dataclass(slots=True)
class StepSamples:
    """What went into one step, gathered lease by lease."""

    rewards: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    group_rewards: dict[str, list[float]] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)
    samples: int = 0
    response_tokens: int = 0
    group_ids: list[str] = field(default_factory=list)
    group_samples: Counter[str] = field(default_factory=Counter)

    def add(self, lease: Lease, version: int) -> None:
        """`version`: the policy that is being trained; lag is counted per sampled token."""
        self.group_ids += [group.group_id for group in lease.groups]
        for row in lease.rows:
            if row.segment == 0:
                self.samples += 1
                self.group_samples[row.group_id] += 1
            if row.segment == 0 and "reward" in row.fields:
                reward = float(row.array("reward"))
                self.rewards.append(reward)
                self.accuracies.append(float(row.array("accuracy")))
                self.group_rewards.setdefault(row.group_id, []).append(reward)
        versions = np.concatenate([row.array("versions") for row in lease.rows])
        drawn, counts = np.unique(versions[versions != NO_VERSION], return_counts=True)
        self.response_tokens += int(counts.sum())
        for value, count in zip(drawn.tolist(), counts.tolist(), strict=True):
            self.lags[version - value] += count

    def of_groups(self) -> dict[str, int]:
        """Group id -> its samples in this step."""
        return {group_id: self.group_samples[group_id] for group_id in self.group_ids}

    def record(self) -> dict[str, float]:
        tokens = sum(self.lags.values())
        record = {
            "version_lag_max": float(max(self.lags)),
            "version_lag_mean": sum(lag * count for lag, count in self.lags.items()) / tokens,
            "response_tokens_mean": self.response_tokens / self.samples,
            "groups_trained": float(len(self.group_ids)),
        }
        if self.rewards:
            record |= {
                "reward_mean": statistics.fmean(self.rewards),
                "reward_std": statistics.pstdev(self.rewards),
                "accuracy_mean": statistics.fmean(self.accuracies),
                "zero_variance_groups": float(sum(_constant(values) for values in self.group_rewards.values())),
            }
        return record


def _constant(values: Sequence[float]) -> bool:
    return min(values) == max(values)

"""From leased rows to training rows, and what a step's record says of them. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bus.records import Lease, Row
from relax.algorithms import ScoredRow, check_batch_mode, compute_advantages, needs_ref
from relax.config.algorithm import AlgorithmConfig
from relax.training.batching import TrainRow
from relax.types import NO_VERSION, SamplingParams


def actor_fields(config: AlgorithmConfig) -> tuple[str, ...]:
    """Fields that a row must have before it is trained."""
    fields = ("tokens", "loss_mask", "rollout_logprobs", "versions", "sampling", "reward", "accuracy")
    return (*fields, "ref_logprobs") if needs_ref(config) else fields


def train_rows(lease: Lease, config: AlgorithmConfig) -> list[TrainRow]:
    """Advantages over each whole group of the lease (B26). Raises `ModeMismatch` (B7)."""
    rows = lease.rows
    sampling = {row.row_id: SamplingParams.from_json(row.json("sampling")) for row in rows}
    check_batch_mode(sampling.items())
    with_ref = needs_ref(config)
    advantages = compute_advantages(
        config,
        [
            ScoredRow(
                row.row_id,
                float(row.array("reward")),
                row.array("loss_mask"),
                row.array("rollout_logprobs"),
                row.array("ref_logprobs") if with_ref else None,
            )
            for row in rows
        ],
    )
    return [
        TrainRow(
            row_id=row.row_id,
            tokens=row.array("tokens"),
            loss_mask=row.array("loss_mask"),
            rollout_logprobs=row.array("rollout_logprobs"),
            versions=row.array("versions"),
            temperature=sampling[row.row_id].temperature,
            advantage=advantages[row.row_id],
            ref_logprobs=row.array("ref_logprobs") if with_ref else None,
        )
        for row in rows
    ]


@dataclass(slots=True)
class StepSamples:
    """What went into one step, gathered lease by lease."""

    rewards: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    group_rewards: dict[str, list[float]] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)
    response_tokens: int = 0
    group_ids: list[str] = field(default_factory=list)

    def add(self, lease: Lease, version: int) -> None:
        """`version`: the policy that is being trained; lag is counted per sampled token."""
        self.group_ids += [group.group_id for group in lease.groups]
        for row in lease.rows:
            if row.segment == 0:
                reward = float(row.array("reward"))
                self.rewards.append(reward)
                self.accuracies.append(float(row.array("accuracy")))
                self.group_rewards.setdefault(row.group_id, []).append(reward)
            self._add_lags(row, version)

    def _add_lags(self, row: Row, version: int) -> None:
        versions = row.array("versions")
        drawn = versions[versions != NO_VERSION]
        self.response_tokens += len(drawn)
        for value, count in zip(*np.unique(drawn, return_counts=True), strict=True):
            self.lags[version - int(value)] += int(count)

    def record(self) -> dict[str, float]:
        tokens = sum(self.lags.values())
        return {
            "reward_mean": statistics.fmean(self.rewards),
            "reward_std": statistics.pstdev(self.rewards),
            "accuracy_mean": statistics.fmean(self.accuracies),
            "version_lag_max": float(max(self.lags)),
            "version_lag_mean": sum(lag * count for lag, count in self.lags.items()) / tokens,
            "response_tokens_mean": self.response_tokens / len(self.rewards),
            "zero_variance_groups": float(sum(_constant(values) for values in self.group_rewards.values())),
            "groups_trained": float(len(self.group_ids)),
        }

    def constant_reward(self) -> bool:
        """Every sample of the step got the same reward: nothing can be learnt from it (B21)."""
        return len(self.rewards) > 1 and _constant(self.rewards)


def _constant(values: Sequence[float]) -> bool:
    return min(values) == max(values)

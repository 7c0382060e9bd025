"""From leased rows to training rows, and what a step's record says of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bus.records import GroupInfo, Lease, Row
from relax.algorithms import ModeMismatch
from relax.config.algorithm import AlgorithmConfig
from relax.types import LogprobMode, SamplingParams
from services.actor.batch import StepSamples, actor_fields, in_order, train_rows

GRPO = AlgorithmConfig(name="grpo", advantage="group_mean")
WITH_KL = AlgorithmConfig(name="grpo", kl={"coef": 0.1})  # type: ignore[arg-type]


def row(group: str, k: int, reward: float, versions: list[int], sampling: SamplingParams | None = None) -> Row:
    length = 2 + len(versions)
    mask = np.arange(length) >= 2
    fields: dict[str, Any] = {
        "tokens": np.arange(length, dtype=np.int32),
        "loss_mask": mask,
        "rollout_logprobs": np.where(mask, -1.0, 0).astype(np.float32),
        "versions": np.array([-1, -1, *versions], np.int32),
        "sampling": (sampling or SamplingParams()).to_json(),
        "reward": np.array(reward, np.float32),
        "accuracy": np.array(reward > 0.5, np.float32),
        "ref_logprobs": np.where(mask, -1.5, 0).astype(np.float32),
    }
    return Row(f"{group}/{k}/0", group, k, 0, fields, {})


def lease(*rows: Row) -> Lease:
    groups = {r.group_id: GroupInfo(r.group_id, 0, 1, 2, 0, "train", {}, (), {}, 0, 0) for r in rows}
    return Lease("lease", "actor", 30.0, rows, tuple(groups.values()))


def test_rows_carry_the_reward_of_their_sample() -> None:
    """behaviour: B26"""
    rows = train_rows(lease(row("a", 0, 1.0, [3]), row("b", 0, 0.25, [3]), row("a", 1, 0.0, [3])), GRPO)
    assert {r.row_id: r.reward for r in rows} == {"a/0/0": 1.0, "b/0/0": 0.25, "a/1/0": 0.0}


def test_training_on_given_responses_reads_no_reward() -> None:
    sft = AlgorithmConfig(name="sft")
    assert "reward" in actor_fields(GRPO) and "reward" not in actor_fields(sft)
    unscored = row("a", 0, 1.0, [0])
    del unscored.fields["reward"], unscored.fields["accuracy"]
    assert train_rows(lease(unscored), sft)[0].reward == 0
    samples = StepSamples()
    samples.add(lease(unscored), 0)
    assert "reward_mean" not in samples.record()


def test_reference_log_probs_travel_only_when_the_algorithm_reads_them() -> None:
    assert "ref_logprobs" in actor_fields(WITH_KL) and "ref_logprobs" not in actor_fields(GRPO)
    assert train_rows(lease(row("a", 0, 1.0, [3])), GRPO)[0].ref_logprobs is None
    assert train_rows(lease(row("a", 0, 1.0, [3])), WITH_KL)[0].ref_logprobs is not None


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(top_p=0.9), SamplingParams(top_k=5), SamplingParams(logprob_mode=LogprobMode.SAMPLING)],
)
def test_a_batch_drawn_in_another_mode_is_refused(sampling: SamplingParams) -> None:
    """behaviour: B7"""
    with pytest.raises(ModeMismatch, match="a/0/0"):
        train_rows(lease(row("a", 0, 1.0, [3], sampling)), GRPO)


def test_lag_is_counted_per_sampled_token_against_the_trained_policy() -> None:
    """behaviour: B9"""
    samples = StepSamples()
    samples.add(lease(row("a", 0, 1.0, [3, 3, 4]), row("a", 1, 0.0, [5])), version=5)
    record = samples.record()
    assert dict(samples.lags) == {2: 2, 1: 1, 0: 1}
    assert record["version_lag_max"] == 2 and record["version_lag_mean"] == pytest.approx(5 / 4)
    assert record["response_tokens_mean"] == 2


def test_groups_without_a_difference_are_counted() -> None:
    samples = StepSamples()
    samples.add(lease(row("a", 0, 1.0, [0]), row("a", 1, 1.0, [0]), row("b", 0, 1.0, [0]), row("b", 1, 0.0, [0])), 0)
    assert samples.record()["zero_variance_groups"] == 1


def test_rows_have_an_order_that_does_not_depend_on_when_they_came() -> None:
    """behaviour: B12. What `run.deterministic` sorts by."""
    late, early = row("toy:0:9", 1, 0.0, [0]), row("toy:0:2", 0, 0.0, [0])
    groups = tuple(
        GroupInfo(name, seq, 1, 2, 0, "train", {}, (), {}, 0, 0) for name, seq in (("toy:0:9", 9), ("toy:0:2", 2))
    )
    batch = Lease("lease", "actor", 30.0, (late, early), groups)
    placed = sorted(in_order(batch, train_rows(batch, GRPO)), key=lambda pair: pair[0])
    assert [(place, training.row_id) for place, training in placed] == [
        ((2, 0, 0), "toy:0:2/0/0"),
        ((9, 1, 0), "toy:0:9/1/0"),
    ]

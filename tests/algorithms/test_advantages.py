from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.algorithms import ScoredRow, compute_advantages
from relax.algorithms.advantages import group_mean, group_mean_std
from relax.config.algorithm import AlgorithmConfig, KlConfig

GRPO = AlgorithmConfig(name="grpo")
REWARD = st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 3))


def test_group_mean_std_golden() -> None:
    """behaviour: B27. Rewards 1 0 0 0: mean 1/4; squared deviations 9/16 + 3/16 = 3/4, over n - 1 = 3 gives
    1/4, std 1/2; so 0.75 / 0.500001 and -0.25 / 0.500001."""
    assert group_mean_std([1.0, 0.0, 0.0, 0.0]) == pytest.approx(
        [1.499997000006, -0.499999000002, -0.499999000002, -0.499999000002], rel=1e-12
    )


def test_group_mean_golden() -> None:
    """behaviour: B27. Rewards 1 0 0 0: mean 1/4."""
    assert group_mean([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("advantage", [group_mean, group_mean_std])
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(advantage: object) -> None:
    """behaviour: B27. The mean of three times 0.1 is not 0.1 in floating point; that must not become a signal."""
    assert callable(advantage)
    assert advantage([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]
    assert advantage([0.7]) == [0.0]


@given(
    groups=st.dictionaries(
        st.integers(0, 50).map(lambda i: f"toy:0:{i}"),
        st.dictionaries(st.integers(0, 15), REWARD, min_size=1, max_size=16),
        min_size=1,
        max_size=6,
    ),
    shuffle=st.randoms(use_true_random=False),
)
def test_advantages_follow_the_group_id_with_missing_members_in_any_order(
    groups: dict[str, dict[int, float]], shuffle: random.Random
) -> None:
    """behaviour: B26. Each group is computed as if it were alone, whatever surrounds it and whoever is missing."""
    rows = [ScoredRow(f"{group}/{k}/0", reward) for group, members in groups.items() for k, reward in members.items()]
    shuffle.shuffle(rows)
    advantages = compute_advantages(GRPO, rows)
    assert set(advantages) == {row.row_id for row in rows}
    for group, members in groups.items():
        expected = group_mean_std(list(members.values()))
        got = [advantages[f"{group}/{k}/0"] for k in members]
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_sample_of_several_rows_counts_once_in_its_group() -> None:
    """behaviour: B26. Rewards 1 and 0, the first split into three rows: mean 1/2, not 3/4."""
    config = AlgorithmConfig(advantage="group_mean")
    rows = [ScoredRow(f"g/0/{segment}", 1.0) for segment in range(3)] + [ScoredRow("g/1/0", 0.0)]
    assert compute_advantages(config, rows) == {"g/0/0": 0.5, "g/0/1": 0.5, "g/0/2": 0.5, "g/1/0": -0.5}


def test_kl_in_the_reward_is_subtracted_before_the_advantage() -> None:
    """behaviour: B27. k1 over the sampled tokens of g/0: (ln 0.5 - ln 0.25) + (ln 0.5 - ln 0.5) = ln 2; the
    prompt's value is ignored. Reward 1 - 0.1 ln 2; g/1 has KL 0 and reward 0; half the difference each."""
    config = AlgorithmConfig(advantage="group_mean", kl=KlConfig(coef=0.1, estimator="k1", place="reward"))
    mask = np.array([False, True, True])
    policy = np.log(np.array([1, 0.5, 0.5], np.float32))
    rows = [
        ScoredRow("g/0/0", 1.0, mask, policy, np.log(np.array([0.3, 0.25, 0.5], np.float32))),
        ScoredRow("g/1/0", 0.0, mask, policy, np.log(np.array([0.3, 0.5, 0.5], np.float32))),
    ]
    half = (1 - 0.1 * math.log(2)) / 2
    assert compute_advantages(config, rows) == pytest.approx({"g/0/0": half, "g/1/0": -half}, rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ScoredRow("g/0/0", math.nan)], "reward is nan"),
        ([ScoredRow("g/0/0", 1.0), ScoredRow("g/0/1", 0.0)], "different rewards"),
        ([ScoredRow("g/0/0", 1.0), ScoredRow("g/0/0", 1.0)], "twice"),
    ],
)
def test_contradictory_rewards_are_refused(rows: list[ScoredRow], words: str) -> None:
    """behaviour: B26."""
    with pytest.raises(ValueError, match=words):
        compute_advantages(GRPO, rows)

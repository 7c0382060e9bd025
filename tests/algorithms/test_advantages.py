from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.algorithms import ScoredRow, compute_advantages, whitened
from relax.algorithms.advantages import AdvantageError, group_mean, group_mean_std, leave_one_out
from relax.config.algorithm import AlgorithmConfig, KlConfig
from relax.types import BoolArray, FloatArray

GRPO = AlgorithmConfig(name="grpo")
ONE = np.array([False, True])


def scored(row_id: str, reward: float, mask: BoolArray = ONE, **arrays: FloatArray) -> ScoredRow:
    return ScoredRow(row_id, reward, mask, **arrays)


def by_row(config: AlgorithmConfig, rows: list[ScoredRow]) -> dict[str, float]:
    """The advantage that all sampled tokens of a row share."""
    out = {}
    for row_id, advantage in compute_advantages(config, rows).items():
        (row,) = [row for row in rows if row.row_id == row_id]
        (value,) = set(advantage.advantages[row.loss_mask].tolist())
        assert not advantage.advantages[~row.loss_mask].any()
        out[row_id] = value
    return out


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


def test_leave_one_out_golden() -> None:
    """behaviour: B27. Rewards 1 0 0 0.5: the others' means are 1/6, 1/2, 1/2, 1/3."""
    assert leave_one_out([1.0, 0.0, 0.0, 0.5]) == pytest.approx([5 / 6, -1 / 2, -1 / 2, 1 / 6])


@pytest.mark.parametrize("advantage", [group_mean, group_mean_std, leave_one_out])
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
    rows = [scored(f"{group}/{k}/0", reward) for group, members in groups.items() for k, reward in members.items()]
    shuffle.shuffle(rows)
    advantages = by_row(GRPO, rows)
    assert set(advantages) == {row.row_id for row in rows}
    for group, members in groups.items():
        expected = group_mean_std(list(members.values()))
        got = [advantages[f"{group}/{k}/0"] for k in members]
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_sample_of_several_rows_counts_once_in_its_group() -> None:
    """behaviour: B26. Rewards 1 and 0, the first split into three rows: mean 1/2, not 3/4."""
    config = AlgorithmConfig(advantage="group_mean")
    rows = [scored(f"g/0/{segment}", 1.0) for segment in range(3)] + [scored("g/1/0", 0.0)]
    assert by_row(config, rows) == {"g/0/0": 0.5, "g/0/1": 0.5, "g/0/2": 0.5, "g/1/0": -0.5}


def test_kl_in_the_reward_is_subtracted_before_the_advantage() -> None:
    """behaviour: B27. k1 over the sampled tokens of g/0: (ln 0.5 - ln 0.25) + (ln 0.5 - ln 0.5) = ln 2; the
    prompt's value is ignored. Reward 1 - 0.1 ln 2; g/1 has KL 0 and reward 0; half the difference each."""
    config = AlgorithmConfig(advantage="group_mean", kl=KlConfig(coef=0.1, estimator="k1", place="reward"))
    mask = np.array([False, True, True])
    policy = np.log(np.array([1, 0.5, 0.5], np.float32))
    rows = [
        ScoredRow(f"g/{k}/0", 1.0 - k, mask, policy, np.log(np.array([0.3, reference, 0.5], np.float32)))
        for k, reference in ((0, 0.25), (1, 0.5))
    ]
    half = (1 - 0.1 * math.log(2)) / 2
    assert by_row(config, rows) == pytest.approx({"g/0/0": half, "g/1/0": -half}, rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([scored("g/0/0", math.nan)], "reward is nan"),
        ([scored("g/0/0", 1.0), scored("g/0/1", 0.0)], "different rewards"),
        ([scored("g/0/0", 1.0), scored("g/0/0", 1.0)], "twice"),
    ],
)
def test_contradictory_rewards_are_refused(rows: list[ScoredRow], words: str) -> None:
    """behaviour: B26."""
    with pytest.raises(ValueError, match=words):
        compute_advantages(GRPO, rows)


def test_the_plain_reward_is_the_advantage_of_every_token() -> None:
    """behaviour: B27"""
    assert by_row(AlgorithmConfig(name="pg"), [scored("g/0/0", 0.25), scored("g/1/0", -1.0)]) == {
        "g/0/0": 0.25,
        "g/1/0": -1.0,
    }


def test_returns_to_go_subtract_the_kl_token_by_token() -> None:
    """behaviour: B27. REINFORCE++: reward 1 on the last of two sampled tokens, k1 of ln 2 on the first and ln 4 on
    the last, coefficient 0.1: G_2 = 1 - 0.1 ln 4, G_1 = G_2 - 0.1 ln 2. The tool's token between them gets 0."""
    config = AlgorithmConfig(name="reinforce_pp", kl={"coef": 0.1})
    assert config.kl.place == "reward" and config.kl.estimator == "k1"
    mask = np.array([False, True, False, True])
    policy = np.log(np.array([1, 0.5, 1, 0.8], np.float32))
    reference = np.log(np.array([0.5, 0.25, 0.3, 0.2], np.float32))
    rows = [ScoredRow("g/0/0", 1.0, mask, policy, reference)]
    last = 1 - 0.1 * math.log(4)
    advantages = compute_advantages(config, rows)["g/0/0"].advantages
    assert advantages == pytest.approx([0, last - 0.1 * math.log(2), 0, last], abs=1e-6)


def test_whitening_golden() -> None:
    """behaviour: B27. Over tokens: one of 1 and three of -1 have mean -1/2 and variance 3/4; so 1.5 / sqrt(0.75)
    and -0.5 / sqrt(0.75)."""
    rows = [scored("a/0/0", 1.0), scored("b/0/0", -1.0, np.array([True, True, False, True]))]
    masks = {row.row_id: row.loss_mask for row in rows}
    white = whitened(compute_advantages(AlgorithmConfig(name="pg"), rows), masks)
    assert white["a/0/0"].advantages == pytest.approx([0, 1.7320508], abs=1e-6)
    assert white["b/0/0"].advantages == pytest.approx([-0.5773503, -0.5773503, 0, -0.5773503], abs=1e-6)


def test_equal_advantages_whiten_to_zero() -> None:
    """behaviour: B27"""
    rows = [scored("a/0/0", 0.1), scored("b/0/0", 0.1)]
    white = whitened(compute_advantages(AlgorithmConfig(name="pg"), rows), {row.row_id: ONE for row in rows})
    assert [a.advantages.tolist() for a in white.values()] == [[0, 0], [0, 0]]


def test_an_own_function_gives_the_advantages() -> None:
    rows = [scored("a/0/0", 2.0), scored("a/1/0", 0.0)]
    own = lambda rows: {row.row_id: np.array([9, row.reward], np.float32) for row in rows}  # noqa: E731
    advantages = compute_advantages(AlgorithmConfig(advantage="own.py:f"), rows, own)
    assert advantages["a/0/0"].advantages.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("value", "words"), [({}, "nothing for row"), ({"a/0/0": math.nan}, "not finite"), ({"a/0/0": [1, 2, 3]}, "shape")]
)
def test_what_an_own_function_returns_is_checked(value: dict[str, object], words: str) -> None:
    with pytest.raises(AdvantageError, match=words):
        compute_advantages(AlgorithmConfig(advantage="own.py:f"), [scored("a/0/0", 2.0)], lambda rows: value)

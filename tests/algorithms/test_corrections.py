"""Importance weights and rejection on the worked example: rho is 2, 1 in row A and 1/2 in row B."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_example import ROLLOUT, log_table, make_batch, mean, run

from relax.algorithms.ratios import m2_masks
from relax.config.algorithm import AlgorithmConfig
from relax.types import PolicyVersion


def config(**correction: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"name": "dapo", "behaviour": "trainer", "correction": correction})


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ({"weight": "token"}, [2, 1, 0.5]),
        ({"weight": "token", "cap": 1.5}, [1.5, 1, 0.5]),
        ({"weight": "sequence"}, [2, 2, 0.5]),
        ({"weight": "sequence", "cap": 1.5}, [1.5, 1.5, 0.5]),
        ({"weight": "geometric"}, [math.sqrt(2), math.sqrt(2), 0.5]),
        ({"mask": "token", "mask_low": 0.6, "mask_high": 1.5}, [0, 1, 0]),
        ({"mask": "sequence", "mask_low": 0.4, "mask_high": 1.9}, [0, 0, 1]),
        ({"mask": "geometric", "mask_low": 0.4, "mask_high": 1.9}, [1, 1, 1]),
        # IcePop: both sides masked, the weight of what is left.
        ({"weight": "token", "mask": "token", "mask_low": 0.5, "mask_high": 1.9}, [0, 1, 0.5]),
    ],
)
def test_golden(correction: dict[str, object], weights: list[float]) -> None:
    """behaviour: B27. The trainer's ratio is 1, so a token's gradient is -weight x advantage, over 3 tokens."""
    output, gradient = run(config(**correction), make_batch(ROLLOUT))
    assert gradient == pytest.approx([-weights[0], -weights[1], weights[2]], abs=1e-6)
    assert output.normaliser == 3
    if correction.get("mask"):
        assert mean(output, "correction_rejected") == pytest.approx(weights.count(0) / 3)
    if correction.get("weight"):
        assert mean(output, "correction_weight_mean") == pytest.approx(sum(weights) / 3, abs=1e-6)


def test_the_ratio_of_a_very_long_row_stays_finite() -> None:
    """behaviour: B45"""
    output, _ = run(config(weight="sequence"), make_batch((1e-30, 1e-30, 0.2)))
    assert math.isfinite(output.loss_sum.item())


def test_tokens_of_old_versions_are_rejected_one_by_one() -> None:
    """behaviour: B27. Trained version 5, at most 1 behind: A1 was drawn by 3, A2 by 4, B1 by 5."""
    versions = torch.tensor([[-1, 3, 4], [-1, 5, -1]], dtype=torch.int32)
    batch = replace(make_batch(ROLLOUT), versions=versions, version=PolicyVersion(5))
    output, gradient = run(config(max_lag=1), batch)
    assert gradient == pytest.approx([0, -1, 1], abs=1e-6)
    assert mean(output, "correction_rejected") == pytest.approx(1 / 3)
    assert "stale_kv_gap" not in output.stats
    # Lag alone: k3 of A1 (1 - ln 2) and A2 (0), not of B1.
    assert mean(output, "policy_kl") == pytest.approx((1 - math.log(2)) / 2, abs=1e-6)


def test_what_a_kept_cache_costs_is_told_apart_from_lag() -> None:
    """behaviour: B6 B11. Row A was begun by version 3 and ended by the trained 5: A2's own gap; row B is all new."""
    versions = torch.tensor([[-1, 3, 5], [-1, 5, -1]], dtype=torch.int32)
    batch = replace(make_batch((0.25, 0.15, 0.2)), versions=versions, version=PolicyVersion(5))
    output, _ = run(config(), batch)
    assert output.stats["stale_kv_gap"] == (pytest.approx(math.log(2), abs=1e-6), 1.0)
    assert output.stats["policy_kl"][1] == 1.0


def test_decoupled_ppo_clips_against_the_proximal_policy_and_weighs_by_the_behaviour_policy() -> None:
    """behaviour: B27. Proximal 0.4, 0.3, 0.2: ratios 1.25, 1, 0.5; rho 1.6, 1, 1. A1 min(1.25, 1.28) x 1.6 = 2; A2 1;
    B1 -0.8, clipped."""
    batch = replace(make_batch(ROLLOUT), proximal_logprobs=log_table((0.4, 0.3, 0.2)))
    output, gradient = run(config(weight="token"), batch)
    assert output.loss_sum.item() == pytest.approx(-(2 + 1 - 0.8), abs=1e-6)
    assert gradient == pytest.approx([-2, -1, 0], abs=1e-6)


LOG2 = math.log(2)
MASKS = {"a/0/0": np.array([False, True, True]), "b/0/0": np.array([False, True, False])}
RATIOS = {"a/0/0": np.array([9, LOG2, 0], np.float32), "b/0/0": np.array([9, -LOG2, 9], np.float32)}
SIGNS = {"a/0/0": np.array([0, 1, 1], np.float32), "b/0/0": np.array([0, -1, 0], np.float32)}


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [
        (0.33, [[0, 1, 1], [0, 1, 0]]),  # the mean of the squares is 2 ln^2 2 / 3 = 0.3203
        (0.25, [[0, 0, 1], [0, 1, 0]]),  # without A1 it is 0.2402
        (0.04, [[0, 0, 1], [0, 0, 0]]),  # without both it is 0
    ],
)
def test_second_moment_mask_golden(threshold: float, kept: list[list[float]]) -> None:
    """behaviour: B27"""
    masks = m2_masks(RATIOS, SIGNS, MASKS, threshold)
    assert [masks["a/0/0"].tolist(), masks["b/0/0"].tolist()] == kept


def test_tokens_whose_update_leads_back_are_never_masked() -> None:
    """behaviour: B27. With the signs turned, A1 and B1 pull the policy back to where the data came from."""
    masks = m2_masks(RATIOS, {k: -v for k, v in SIGNS.items()}, MASKS, 0.04)
    assert [masks["a/0/0"].tolist(), masks["b/0/0"].tolist()] == [[0, 1, 1], [0, 1, 0]]


@given(
    st.lists(st.tuples(st.floats(-2, 2, width=32), st.sampled_from([-1.0, 1.0])), min_size=1, max_size=40),
    st.floats(0.01, 1),
)
def test_the_mask_bounds_the_mean_and_takes_the_largest(tokens: list[tuple[float, float]], threshold: float) -> None:
    """behaviour: B27"""
    ratio = np.array([0.0, *(t[0] for t in tokens)], np.float32)
    sign = np.array([0.0, *(t[1] for t in tokens)], np.float32)
    mask = np.arange(len(ratio)) > 0
    kept = m2_masks({"g/0/0": ratio}, {"g/0/0": sign}, {"g/0/0": mask}, threshold)["g/0/0"]
    squares = ratio.astype(np.float64) ** 2
    left = squares[kept == 1]
    outward = mask & (ratio * sign > 0)
    if len(left):
        assert left.mean() <= threshold + 1e-9 or not (outward & (kept == 1)).any()
    masked = squares[mask & (kept == 0)]
    if len(masked) and (outward & (kept == 1)).any():
        assert masked.min() >= squares[outward & (kept == 1)].max()
    assert not (kept[~mask]).any() and (kept[mask & ~outward] == 1).all()

from __future__ import annotations

import numpy as np
import pytest

from relax.algorithms import ScoredRow, compute_advantages
from relax.algorithms.returns import gae, returns_to_go
from relax.config.algorithm import AlgorithmConfig

REWARDS = np.array([0.0, 0.0, 1.0])
VALUES = np.array([0.5, 0.6, 0.7], np.float32)


def test_returns_to_go_golden() -> None:
    """behaviour: B27"""
    assert returns_to_go(np.array([1.0, 2.0, 4.0]), 0.5).tolist() == [3.0, 4.0, 4.0]


def test_gae_golden() -> None:
    """behaviour: B27. gamma 1, lambda 0.95: deltas 0.1, 0.1, 0.3; A = 0.3, 0.1 + 0.95 x 0.3, 0.1 + 0.95 x 0.385."""
    advantages, returns = gae(REWARDS, VALUES, 1.0, 0.95)
    assert advantages == pytest.approx([0.46575, 0.385, 0.3], abs=1e-6)
    assert returns == pytest.approx([0.96575, 0.985, 1.0], abs=1e-6)


def test_gae_golden_with_a_discount() -> None:
    """behaviour: B27. gamma 0.9, lambda 0.5: deltas 0.54 - 0.5, 0.63 - 0.6, 0.3; gamma lambda 0.45."""
    advantages, _ = gae(REWARDS, VALUES, 0.9, 0.5)
    assert advantages == pytest.approx([0.11425, 0.165, 0.3], abs=1e-6)


def test_gae_runs_over_sampled_tokens_alone() -> None:
    """behaviour: B27. A tool's tokens between two sampled ones take part in nothing."""
    mask = np.array([False, True, False, False, True, True])
    values = np.array([9, 0.5, 9, 9, 0.6, 0.7], np.float32)
    config = AlgorithmConfig(name="ppo")
    row = compute_advantages(config, [ScoredRow("g/0/0", 1.0, mask, values=values)])["g/0/0"]
    assert row.advantages == pytest.approx([0, 0.46575, 0, 0, 0.385, 0.3], abs=1e-6)
    assert row.returns == pytest.approx([0, 0.96575, 0, 0, 0.985, 1.0], abs=1e-6)


def test_gae_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the critic's values"):
        compute_advantages(AlgorithmConfig(name="ppo"), [ScoredRow("g/0/0", 1.0, np.array([False, True]))])

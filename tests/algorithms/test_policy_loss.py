"""The policy loss on the worked example of `loss_example`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from loss_example import REF, ROLLOUT, make_batch, mean, run

from relax.algorithms import needs_ref
from relax.config.algorithm import AlgorithmConfig, CorrectionConfig, KlConfig


def test_grpo_golden() -> None:
    """behaviour: B27. GRPO eq. 3 with KL coefficient 0.1.

    Surrogate: A1 min(2, 1.2) = 1.2; A2 1; B1 min(-0.5, -0.8) = -0.8.
    k3 with r = ref / policy = 2, 1, 1/2: 2 - 1 - ln 2 = 0.306853; 0; 1/2 - 1 + ln 2 = 0.193147.
    Token losses: -1.2 + 0.0306853; -1; 0.8 + 0.0193147. Row means: -1.0846574 and 0.8193147, over 2 rows.
    Gradient: A1 is clipped, its KL gives 0.1 (1 - 2) / 2; A2 -1 / 2; B1 is clipped, its KL gives 0.1 (1 - 1/2).
    """
    config = AlgorithmConfig(name="grpo", kl=KlConfig(coef=0.1))
    output, grad = run(config, make_batch(ROLLOUT, REF))
    assert output.loss_sum.item() == pytest.approx(-0.2653427, abs=1e-6)
    assert output.normaliser == 2
    assert grad == pytest.approx([-0.05, -0.5, 0.05], abs=1e-6)
    assert mean(output, "kl") == pytest.approx(0.5 / 3, abs=1e-6)
    assert mean(output, "policy_loss") == pytest.approx((-1.1 + 0.8) / 2, abs=1e-6)


def test_dapo_golden() -> None:
    """behaviour: B27. DAPO eq. 8: A1 min(2, 1.28), A2 1, B1 -0.8; minus the sum, over 3 tokens. Only A2 moves."""
    output, grad = run(AlgorithmConfig(name="dapo"), make_batch(ROLLOUT))
    assert output.loss_sum.item() == pytest.approx(-1.48, abs=1e-6)
    assert output.normaliser == 3
    assert grad == pytest.approx([0, -1, 0], abs=1e-6)


def test_clipping_leaves_the_pessimistic_side_open() -> None:
    """behaviour: B27. With the advantages' signs turned, min picks the unclipped term: A1 -2 and B1 +0.5."""
    batch = make_batch(ROLLOUT)
    output, grad = run(AlgorithmConfig(name="dapo"), replace(batch, advantages=-batch.advantages))
    assert output.loss_sum.item() == pytest.approx(2 + 1 - 0.5, abs=1e-6)
    assert grad == pytest.approx([2, 1, -0.5], abs=1e-6)


def test_truncated_importance_sampling_golden() -> None:
    """behaviour: B27. behaviour `trainer`, cap 1.5: weights min(2, 1.5), 1, 1/2 on ratios of 1; nothing is clipped.

    Loss -1.5 - 1 + 0.5 = -2; the gradient of each token is -weight x advantage.
    """
    config = AlgorithmConfig(name="dapo", behaviour="trainer", correction=CorrectionConfig(weight="token", cap=1.5))
    output, grad = run(config, make_batch(ROLLOUT))
    assert output.loss_sum.item() == pytest.approx(-2.0, abs=1e-6)
    assert grad == pytest.approx([-1.5, -1, 0.5], abs=1e-6)
    assert mean(output, "correction_weight_mean") == pytest.approx(1.0, abs=1e-6)
    assert mean(output, "correction_truncated") == pytest.approx(1 / 3)
    assert mean(output, "clip_fraction_high") == 0


def test_trainer_behaviour_without_a_cap_ignores_the_rollout_logprobs() -> None:
    """behaviour: B27. Ratio 1, weight 1: the plain policy gradient."""
    output, grad = run(AlgorithmConfig(name="dapo", behaviour="trainer"), make_batch(ROLLOUT))
    assert output.loss_sum.item() == pytest.approx(-1, abs=1e-6)
    assert grad == pytest.approx([-1, -1, 1], abs=1e-6)


def test_entropy_bonus_lowers_the_loss_of_sampled_tokens() -> None:
    """behaviour: B27. Coefficient 0.5, entropies 1, 2, 3 on the sampled tokens and 9 elsewhere: -0.5 x 6."""
    entropy = torch.tensor([[9.0, 1.0, 2.0], [9.0, 3.0, 9.0]], requires_grad=True)
    output, _ = run(AlgorithmConfig(name="dapo", entropy_coef=0.5), make_batch(ROLLOUT), entropy)
    assert output.loss_sum.item() == pytest.approx(-1.48 - 3.0, abs=1e-6)
    assert mean(output, "entropy") == 2
    assert entropy.grad is not None
    assert entropy.grad.tolist() == [[0, -0.5, -0.5], [0, -0.5, 0]]


def test_statistics_of_the_gap_and_of_clipping() -> None:
    """behaviour: B8. log ratios ln 2, 0, -ln 2. k3 of the gap: (2 - 1 - ln 2) + (1/2 - 1 + ln 2) = 1/2, over 3."""
    output, _ = run(AlgorithmConfig(name="dapo"), make_batch(ROLLOUT))
    assert mean(output, "logprob_diff_mean") == pytest.approx(2 * math.log(2) / 3, abs=1e-6)
    assert output.stats["logprob_diff_max"] == (pytest.approx(math.log(2), abs=1e-6), 1.0)
    assert mean(output, "rollout_kl") == pytest.approx(0.5 / 3, abs=1e-6)
    assert mean(output, "ratio_mean") == pytest.approx(3.5 / 3, abs=1e-6)
    assert mean(output, "clip_fraction_high") == pytest.approx(1 / 3)
    assert mean(output, "clip_fraction_low") == pytest.approx(1 / 3)


def test_kl_in_the_reward_leaves_the_loss_alone() -> None:
    """behaviour: B27. It already is in the advantages; the KL is only reported."""
    config = AlgorithmConfig(name="dapo", kl=KlConfig(coef=0.1, place="reward"))
    output, _ = run(config, make_batch(ROLLOUT, REF))
    assert output.loss_sum.item() == pytest.approx(-1.48, abs=1e-6)
    assert mean(output, "kl") == pytest.approx(0.5 / 3, abs=1e-6)
    assert needs_ref(config) and not needs_ref(AlgorithmConfig())


def test_a_kl_term_without_reference_logprobs_is_refused() -> None:
    """behaviour: B27. Never a silent KL of 0."""
    with pytest.raises(ValueError, match="ref_logprobs"):
        run(AlgorithmConfig(kl=KlConfig(coef=0.1)), make_batch(ROLLOUT))

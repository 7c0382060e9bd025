from __future__ import annotations

import math
from dataclasses import replace

import pytest
from loss_example import POLICY, REF, ROLLOUT, make_batch, mean, run

from relax.config.algorithm import AlgorithmConfig

PAIR = ("g/0/0", "g/1/0")


def test_supervised_golden() -> None:
    """behaviour: B27. Cross-entropy of the three response tokens, mean over tokens."""
    output, gradient = run(AlgorithmConfig(name="sft"), make_batch(ROLLOUT))
    nll = -sum(math.log(p) for p in POLICY)
    assert output.loss_sum.item() == pytest.approx(nll, abs=1e-6)
    assert output.normaliser == 3
    assert gradient == [-1, -1, -1]
    assert mean(output, "nll") == pytest.approx(nll / 3, abs=1e-6)


def test_preference_golden() -> None:
    """behaviour: B27. A chosen, B rejected; gains over the reference ln 0.5 + ln 1 and ln 2; beta 0.1: the margin is
    -0.2 ln 2 = -0.1386294, the loss ln(1 + e^0.1386294) = 0.7648618, its slope -beta sigmoid(0.1386294)."""
    batch = replace(make_batch(ROLLOUT, REF), row_ids=PAIR)
    output, gradient = run(AlgorithmConfig(name="dpo"), batch)
    assert output.loss_sum.item() == pytest.approx(math.log1p(math.exp(0.1386294)), abs=1e-6)
    assert output.normaliser == 1
    slope = 0.1 / (1 + math.exp(-0.1386294))
    assert gradient == pytest.approx([-slope, -slope, slope], abs=1e-6)
    assert mean(output, "preference_accuracy") == 0
    assert mean(output, "preference_margin") == pytest.approx(-0.1386294, abs=1e-6)


def test_preference_with_label_smoothing_golden() -> None:
    """behaviour: B27. 0.9 x ln(1 + e^0.1386294) + 0.1 x ln(1 + e^-0.1386294)."""
    batch = replace(make_batch(ROLLOUT, REF), row_ids=PAIR)
    output, _ = run(AlgorithmConfig(name="dpo", dpo={"label_smoothing": 0.1}), batch)
    expected = 0.9 * math.log1p(math.exp(0.1386294)) + 0.1 * math.log1p(math.exp(-0.1386294))
    assert output.loss_sum.item() == pytest.approx(expected, abs=1e-6)


def test_a_row_without_its_partner_is_refused() -> None:
    """behaviour: B26"""
    with pytest.raises(ValueError, match="group h is no pair"):
        run(AlgorithmConfig(name="dpo"), replace(make_batch(ROLLOUT, REF), row_ids=("h/0/0", "h/2/0")))


def test_a_preference_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="ref_logprobs"):
        run(AlgorithmConfig(name="dpo"), replace(make_batch(ROLLOUT), row_ids=PAIR))

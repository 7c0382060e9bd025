"""Each preset's loss on the worked example of `loss_example`: ratios 2, 1, 1/2, advantages +1, +1, -1."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from loss_example import POLICY, ROLLOUT, make_batch, mean, run

from relax.algorithms import build_loss, needs_proximal, needs_step
from relax.config.algorithm import AlgorithmConfig, AlgorithmName

LOG = [math.log(p) for p in POLICY]


@pytest.mark.parametrize(
    ("name", "fields", "loss", "normaliser", "gradient"),
    [
        # Constant 10, no std: -(1.2 + 1 - 0.8) / 10 over 2 rows; A1 and B1 are clipped.
        ("dr_grpo", {"aggregation_constant": 10}, -0.14, 2, [0, -0.1, 0]),
        # -(ln 0.5 + ln 0.3 - ln 0.1), summed over tokens, over 2 rows.
        ("rloo", {}, -(LOG[0] + LOG[1] - LOG[2]), 2, [-1, -1, 1]),
        # The same, over 3 tokens.
        ("pg", {}, -(LOG[0] + LOG[1] - LOG[2]), 3, [-1, -1, 1]),
        # PPO's clip, token mean: min(2, 1.2), 1, -0.8.
        ("reinforce_pp", {}, -1.4, 3, [0, -1, 0]),
        ("reinforce_pp_baseline", {}, -1.4, 3, [0, -1, 0]),
        ("ppo", {}, -1.4, 3, [0, -1, 0]),
        # Row ratios sqrt 2 and 1/2 against 1.0004 and 0.9997: both are clipped.
        ("gspo", {}, -1.0004 + 0.9997, 2, [0, 0, 0]),
        # Unclipped: row losses -sqrt 2 and 1/2; each token of A moves the row's ratio by half.
        ("gspo", {"clip_high": 1.0, "clip_low": 1.0}, -math.sqrt(2) + 0.5, 2, [-math.sqrt(2) / 2] * 2 + [0.5]),
        # Weights 2, 1, 1/2 without gradient on A log p.
        ("cispo", {}, -(2 * LOG[0] + LOG[1] - LOG[2] / 2), 3, [-2, -1, 0.5]),
        # The weight is clipped at 1.5 and the token still learns.
        ("cispo", {"clip_high": 0.5}, -(1.5 * LOG[0] + LOG[1] - LOG[2] / 2), 3, [-1.5, -1, 0.5]),
        # 4 sigmoid(1) = 2.924234, 2, (4 / 1.05) sigmoid(-0.525) = 1.415939; slopes 4 s (1 - s) r A over the row.
        ("sapo", {}, -(2.924234 + 2) / 2 + 1.415939, 2, [-1.572895 / 2, -0.5, 0.467070]),
        # The unclipped ratio; what is masked comes with the batch.
        ("m2po", {}, -(2 + 1 - 0.5), 3, [-2, -1, 0.5]),
    ],
)
def test_golden(name: str, fields: dict[str, object], loss: float, normaliser: float, gradient: list[float]) -> None:
    """behaviour: B27"""
    output, found = run(AlgorithmConfig.model_validate({"name": name, **fields}), make_batch(ROLLOUT))
    assert output.loss_sum.item() == pytest.approx(loss, abs=2e-6)
    assert output.normaliser == normaliser
    assert found == pytest.approx(gradient, abs=2e-6)


def test_the_divisor_of_dr_grpo_is_the_longest_response_unless_given() -> None:
    """behaviour: B27"""
    logprobs = make_batch(POLICY).rollout_logprobs
    output = build_loss(AlgorithmConfig(name="dr_grpo"), 10)(make_batch(ROLLOUT), logprobs, torch.zeros(2, 3))
    assert output.loss_sum.item() == pytest.approx(-0.14, abs=1e-6)


def test_masked_tokens_weigh_nothing_and_stay_in_the_divisor() -> None:
    """behaviour: B27. M2PO with A1 masked: -(0 + 1 - 0.5), over 3 tokens."""
    batch = replace(make_batch(ROLLOUT), token_weights=torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))
    output, gradient = run(AlgorithmConfig(name="m2po"), batch)
    assert output.loss_sum.item() == pytest.approx(-0.5, abs=1e-6)
    assert output.normaliser == 3
    assert gradient == pytest.approx([0, -1, 0.5], abs=1e-6)
    assert mean(output, "m2_masked") == pytest.approx(1 / 3)


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    """behaviour: B27. Advantages turned: A1 has ratio 2 and A -1, so -2 without and -1.5 with the bound."""
    batch = make_batch(ROLLOUT)
    turned = replace(batch, advantages=-batch.advantages)
    output, gradient = run(AlgorithmConfig(name="dapo", dual_clip=1.5), turned)
    assert output.loss_sum.item() == pytest.approx(1.5 + 1 - 0.5, abs=1e-6)
    assert gradient == pytest.approx([0, 1, -0.5], abs=1e-6)


def test_a_preset_gives_what_its_paper_says_and_the_user_may_change_any_field() -> None:
    gspo = AlgorithmConfig(name="gspo", clip_high=0.1)
    assert (gspo.ratio, gspo.aggregation, gspo.clip_low, gspo.clip_high) == ("sequence", "seq_mean", 3e-4, 0.1)
    baseline = AlgorithmConfig(name="reinforce_pp_baseline", kl={"coef": 0.01})
    assert (baseline.kl.coef, baseline.kl.estimator, baseline.kl.place) == (0.01, "k2", "loss")


@pytest.mark.parametrize(
    ("fields", "step", "proximal"),
    [
        ({"name": "grpo"}, False, False),
        ({"name": "grpo", "mini_batches": 4}, True, False),
        ({"name": "grpo", "epochs": 2}, True, False),
        ({"name": "dapo", "behaviour": "trainer"}, False, False),
        ({"name": "dapo", "behaviour": "trainer", "mini_batches": 2}, True, True),
        ({"name": "reinforce_pp"}, True, False),
        ({"name": "m2po"}, True, True),
        ({"name": "ppo"}, True, False),
        ({"name": "sft"}, False, False),
    ],
)
def test_what_an_algorithm_reads_decides_whether_a_step_is_streamed(
    fields: dict[str, object], step: bool, proximal: bool
) -> None:
    """behaviour: B25"""
    config = AlgorithmConfig.model_validate(fields)
    assert (needs_step(config), needs_proximal(config)) == (step, proximal)


def test_the_page_of_algorithms_lists_every_preset_with_a_test_that_is_there() -> None:
    """behaviour: B43"""
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    rows = {cells[0].strip(" `"): cells for line in page.splitlines() if (cells := line.split("|")[1:-1])}
    for name in get_args(AlgorithmName):
        test = rows[name][-1].strip(" `")
        assert name in (Path(__file__).parent / test).read_text(), f"{test} does not name {name}"

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_example import ROLLOUT, log_table, make_batch, mean, run

from relax.algorithms import ScoredRow, compute_advantages, teacher_columns
from relax.algorithms.distill import topk_kl
from relax.config.algorithm import AlgorithmConfig

P = torch.tensor([0.5, 0.25]).log()
Q = torch.tensor([0.25, 0.25]).log()


def test_topk_kl_golden() -> None:
    """behaviour: B27. p 0.5, 0.25 and a rest of 0.25; q 0.25, 0.25 and 0.5: 0.5 ln 2 + 0 - 0.25 ln 2."""
    assert topk_kl(P, Q).item() == pytest.approx(0.25 * math.log(2), abs=1e-6)


DISTRIBUTION = st.lists(st.floats(0.01, 1), min_size=4, max_size=4).map(
    lambda values: torch.tensor(values, dtype=torch.float64) / sum(values)
)


@given(DISTRIBUTION, DISTRIBUTION)
def test_topk_kl_is_a_lower_bound_that_all_tokens_reach(p: torch.Tensor, q: torch.Tensor) -> None:
    """behaviour: B27"""
    exact = float((p * (p / q).log()).sum())
    few, most = (float(topk_kl(p[:k].log(), q[:k].log())) for k in (2, 3))
    assert -1e-9 <= few <= most + 1e-9 and most == pytest.approx(exact, abs=1e-6)


def test_the_sampled_form_is_a_reward_per_token() -> None:
    """behaviour: B27. 2 (log p_teacher - log p_rollout): 2 ln 2 where the teacher is twice as sure, 0 where it agrees;
    the prompt gets nothing, and the reward's own advantage stays."""
    mask = np.array([False, True, True])
    rollout, teacher = np.log(np.array([1, 0.25, 0.5], np.float32)), np.log(np.array([0.3, 0.5, 0.5], np.float32))
    row = ScoredRow("g/0/0", 1.0, mask, rollout, teacher_logprobs=teacher)
    alone = AlgorithmConfig(name="opd", distill={"coef": 2.0})
    assert compute_advantages(alone, [row])["g/0/0"].advantages == pytest.approx([0, 2 * math.log(2), 0], abs=1e-6)
    mixed = AlgorithmConfig(name="pg", distill={"coef": 2.0})
    assert compute_advantages(mixed, [row])["g/0/0"].advantages == pytest.approx([0, 1 + 2 * math.log(2), 1], abs=1e-6)
    with pytest.raises(ValueError, match="needs teacher_logprobs"):
        compute_advantages(alone, [replace(row, teacher_logprobs=None)])


@pytest.mark.parametrize(
    ("form", "per_token", "slope"),
    [
        # KL(student || teacher) as in the golden case above; with p the student's, d/dlog p_k = p_k (log p_k/q_k -
        # log tail_p/tail_q) at fixed logits of the others: 0.5 (ln 2 - ln 0.5) and 0.25 (0 - ln 0.5).
        ("topk_reverse", 0.25 * math.log(2), [0.5 * 2 * math.log(2), 0.25 * math.log(2)]),
        # KL(teacher || student): 0.25 ln 0.5 + 0 + 0.5 ln 2; d/dlog p_k = -q_k + p_k tail_q / tail_p.
        ("topk_forward", 0.25 * math.log(2), [-0.25 + 0.5 * 2, -0.25 + 0.25 * 2]),
    ],
)
def test_topk_golden(form: str, per_token: float, slope: list[float]) -> None:
    """behaviour: B27"""
    config = AlgorithmConfig(name="opd", surrogate="ratio", distill={"coef": 2.0, "form": form})
    policy = P.expand(2, 3, 2).clone().requires_grad_()
    batch = replace(
        make_batch(ROLLOUT),
        advantages=torch.zeros(2, 3),
        teacher_logprobs=log_table((0.5, 0.3, 0.1)),
        teacher_topk_logprobs=Q.expand(2, 3, 2).clone(),
        teacher_topk_ids=torch.zeros(2, 3, 2, dtype=torch.int64),
        topk_logprobs=policy,
    )
    output, _ = run(config, batch)
    assert output.loss_sum.item() == pytest.approx(3 * 2 * per_token, abs=1e-6)
    assert mean(output, "teacher_topk_kl") == pytest.approx(per_token, abs=1e-6)
    assert mean(output, "teacher_kl") == pytest.approx((math.log(0.5) + math.log(2)) / 3, abs=1e-6)
    assert policy.grad is not None
    assert policy.grad[0, 1].tolist() == pytest.approx([2 * s for s in slope], abs=1e-5)
    assert not policy.grad[0, 0].any() and not policy.grad[1, 2].any()


def test_a_topk_form_without_the_tokens_is_refused() -> None:
    config = AlgorithmConfig(name="opd", distill={"form": "topk_reverse"})
    with pytest.raises(ValueError, match="top tokens"):
        run(config, make_batch(ROLLOUT))


def test_rows_need_what_the_form_reads() -> None:
    assert teacher_columns(AlgorithmConfig(name="grpo")) == ()
    assert teacher_columns(AlgorithmConfig(name="opd")) == ("teacher_logprobs",)
    assert "teacher_topk_ids" in teacher_columns(AlgorithmConfig(name="opd", distill={"form": "topk_forward"}))

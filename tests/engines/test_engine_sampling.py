"""Draws and their log-probs, without an engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from relax.engines.sampling import SamplingRows, fold_seed, sample, uniforms
from relax.types import SamplingParams

CPU = torch.device("cpu")


def draw(
    logits: torch.Tensor, params: list[SamplingParams], u: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, temperature, sampling = sample(logits, SamplingRows.build(params, logits.shape[1], CPU), u)
    return tokens.numpy(), temperature.numpy(), sampling.numpy()


def kept_by_hand(logits: torch.Tensor, p: SamplingParams) -> list[int]:
    """Temperature, then top-k, then the smallest set of the rest that reaches top-p, one token at a time."""
    probs = torch.softmax(logits.double() / p.temperature, -1)
    order = probs.argsort(descending=True).tolist()
    order = order[: p.top_k] if p.top_k > 0 else order
    total = float(probs[order].sum())
    kept, mass = [], 0.0
    for token in order:
        if kept and mass >= p.top_p * total:
            break
        kept.append(token)
        mass += float(probs[token])
    return kept


def test_uniforms_are_uniform_and_uncorrelated_over_neighbouring_seeds_and_positions() -> None:
    seeds, positions = (a.ravel() for a in np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300)))
    u = uniforms(seeds, positions).reshape(300, 300)
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    assert ((counts - 1800) ** 2 / 1800).sum() < 100  # chi-square, 49 degrees of freedom
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[1:, :-1], u[:-1, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
    assert len(np.unique(u)) == u.size


def test_a_draw_depends_on_its_seed_and_position_only() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=0.5 + 0.2 * i, top_k=[-1, 5, 3, -1, 20, -1][i]) for i in range(6)]
    u = uniforms(np.arange(6, dtype=np.uint64), np.full(6, 11))
    together = draw(logits, params, u)[0]
    order = [3, 1, 5, 0, 4, 2]
    shuffled = draw(logits[order], [params[i] for i in order], u[order])[0]
    assert (shuffled == together[order]).all()
    alone = [draw(logits[i : i + 1], params[i : i + 1], u[i : i + 1])[0][0] for i in range(6)]
    assert alone == together.tolist()


def test_negative_and_huge_seeds_are_folded() -> None:
    assert fold_seed(-1) == (1 << 64) - 1
    assert fold_seed((1 << 64) + 5) == 5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.3, top_k=4),
        SamplingParams(temperature=0.8, top_p=0.6),
        SamplingParams(temperature=0.7, top_k=9, top_p=0.8),
        SamplingParams(top_p=1e-6),
        SamplingParams(top_p=0.0),
    ],
)
def test_frequencies_follow_the_truncated_distribution_and_log_probs_are_its_own(params: SamplingParams) -> None:
    logits = torch.randn(16, generator=torch.Generator().manual_seed(3)) * 1.5
    n = 40_000
    u = uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, dtype=np.int64))
    tokens, temperature_lp, sampling_lp = draw(logits.expand(n, -1), [params] * n, u)
    kept = kept_by_hand(logits, params)
    assert set(tokens.tolist()) <= set(kept)
    full = torch.softmax(logits.double() / params.temperature, -1)
    expected = torch.zeros(16, dtype=torch.float64)
    expected[kept] = full[kept] / full[kept].sum()
    frequency = np.bincount(tokens, minlength=16) / n
    assert np.abs(frequency - expected.numpy()).max() < 0.012  # over 4 standard errors
    np.testing.assert_allclose(temperature_lp, full.log()[tokens].numpy(), atol=1e-6)
    np.testing.assert_allclose(sampling_lp, expected.log()[tokens].numpy(), atol=1e-6)


def test_temperature_zero_takes_the_best_token_with_log_probs_at_temperature_one() -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(5))
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0, top_k=3), SamplingParams()]
    tokens, temperature_lp, sampling_lp = draw(logits, params, np.full(4, 0.999))
    for row in (0, 2):
        assert tokens[row] == int(logits[row].argmax())
        expected = float(torch.log_softmax(logits[row], -1).max())
        assert temperature_lp[row] == pytest.approx(expected, abs=1e-6)
        assert sampling_lp[row] == pytest.approx(expected, abs=1e-6)
    assert (draw(logits, [SamplingParams(temperature=0)] * 4, np.zeros(4))[0] == logits.argmax(-1).numpy()).all()


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]]).expand(2, -1)
    tokens = draw(logits, [SamplingParams()] * 2, np.array([0.0, 1 - 2.0**-52]))[0]
    assert tokens.tolist() == [0, 2]


def test_the_tail_of_a_large_vocabulary_can_be_drawn() -> None:
    logits = torch.full((1, 200_000), -30.0)
    logits[0, 0] = 0.0  # each of the others has 9e-14, below the resolution of a float32 sum near 1
    tokens = draw(logits, [SamplingParams()], np.array([1 - 5e-9]))[0]
    assert 100_000 < tokens[0] < 199_999

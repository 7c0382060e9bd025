from __future__ import annotations

import pytest
import torch

from relax.training import token_logprobs as module
from relax.training.token_logprobs import token_logprobs, top_logprobs


@pytest.mark.parametrize("chunk_elements", [1 << 20, 10])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.4)])
def test_values_and_gradients_equal_those_of_log_softmax(
    chunk_elements: int, weights: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B6. Of log-probs, of entropies and of both; in one chunk and in several."""
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = (torch.randn(7, 5, dtype=torch.float64) * 3).requires_grad_()
    targets, temperature = torch.arange(7) % 5, torch.linspace(0.5, 2, 7)
    pull = torch.randn(7, dtype=torch.float64)

    full = (logits / temperature[:, None]).log_softmax(-1)
    expected = full[torch.arange(7), targets]
    expected_entropy = -(full.exp() * full).sum(-1)
    (expected_gradient,) = torch.autograd.grad(
        (pull * (weights[0] * expected + weights[1] * expected_entropy)).sum(), logits
    )
    logprobs, entropy = token_logprobs(logits, targets, temperature)
    used = [w * t for w, t in zip(weights, (logprobs, entropy), strict=True) if w]
    (gradient,) = torch.autograd.grad((pull * sum(used)).sum(), logits)

    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("chunk_elements", [1 << 20, 10])
def test_several_tokens_of_a_position(chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """behaviour: B6"""
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(1)
    logits = torch.randn(6, 5, dtype=torch.float64).requires_grad_()
    temperature, pull = torch.linspace(0.5, 2, 6), torch.randn(6, 3, dtype=torch.float64)
    ids, tops = top_logprobs(logits.detach(), temperature, 3)
    full = (logits / temperature[:, None]).log_softmax(-1)
    torch.testing.assert_close(tops, full.detach().topk(3).values)
    assert torch.equal(ids, full.detach().topk(3).indices)
    (expected,) = torch.autograd.grad((pull * full.gather(1, ids)).sum(), logits)
    found, _ = token_logprobs(logits, ids, temperature)
    (gradient,) = torch.autograd.grad((pull * found).sum(), logits)
    torch.testing.assert_close(gradient, expected)

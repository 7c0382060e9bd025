from __future__ import annotations

import pytest
import torch

from relax.training import token_logprobs as module
from relax.training.token_logprobs import token_logprobs


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

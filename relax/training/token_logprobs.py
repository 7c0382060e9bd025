"""Log-probs and entropies of chosen tokens, without keeping a softmax of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 23


class _TokenLogprobs(torch.autograd.Function):
    """Saves the logits and two numbers per token; the softmax is recomputed in the backward pass, by chunks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprobs = torch.empty(targets.shape, dtype=dtype, device=logits.device)
        normaliser, entropy = torch.empty_like(logprobs[:, 0]), torch.empty_like(logprobs[:, 0])
        for part in _chunks(logits):
            scaled = logits[part].to(dtype) / temperature[part, None]
            normaliser[part] = torch.logsumexp(scaled, dim=-1)
            logprobs[part] = scaled.gather(1, targets[part]) - normaliser[part, None]
            probs = (scaled - normaliser[part, None]).exp_()
            entropy[part] = normaliser[part] - probs.mul_(scaled).sum(dim=-1)
        ctx.save_for_backward(logits, targets, temperature, normaliser, entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        grad_logprobs, grad_entropy = grads
        logits, targets, temperature, normaliser, entropy = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None
        grad = torch.empty_like(logits)
        for part in _chunks(logits):
            # d logprob / dz = (onehot - p) / t and d entropy / dz = -p (log p + entropy) / t
            log_p = logits[part].to(normaliser.dtype) / temperature[part, None] - normaliser[part, None]
            probs = log_p.exp()
            if grad_entropy is None:
                total = probs * -grad_logprobs[part].sum(1, keepdim=True)  # type: ignore[index]
            else:
                total = (log_p + entropy[part, None]).mul_(probs).mul_(-grad_entropy[part, None])
                if grad_logprobs is not None:
                    total -= probs * grad_logprobs[part].sum(1, keepdim=True)
            if grad_logprobs is not None:
                total.scatter_add_(1, targets[part], grad_logprobs[part])
            grad[part] = total / temperature[part, None]
        return grad, None, None


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


def token_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / temperature) at `targets`, and the entropy of that distribution, in nats.

    logits: [N, V], any float type; targets: int64 [N] or [N, M]; temperature: float32 [N], above 0. Returns
    float32 of the shape of `targets`, and [N] (float64 for float64 logits), both with gradient to the logits.
    """
    columns = targets[:, None] if targets.ndim == 1 else targets
    logprobs, entropy = _TokenLogprobs.apply(logits, columns, temperature)  # type: ignore[no-untyped-call]
    return (logprobs.squeeze(1) if targets.ndim == 1 else logprobs), entropy


@torch.no_grad()
def top_logprobs(logits: Tensor, temperature: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens, int64 [N, k], and their log-probs, float32 [N, k], most likely first."""
    ids = torch.cat([logits[part].topk(k, dim=-1).indices for part in _chunks(logits)])
    return ids, token_logprobs(logits, ids, temperature)[0]

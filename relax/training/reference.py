"""A frozen model that scores given tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from relax.training.scoring import Scorer
from relax.training.torch_backend import load_model
from relax.types import ModelError


class ReferenceModel:
    """Loaded from a Hugging Face folder; `weights`, if given, replace every parameter.

    Raises `ModelError` when a tensor is missing, unknown, or of another shape.
    """

    def __init__(
        self,
        folder: Path,
        weights: Iterable[tuple[str, Tensor]] | None,
        *,
        trust_remote_code: bool = False,
        share_prompts: bool = False,
    ):
        model = load_model(folder, trust_remote_code).requires_grad_(False)
        if weights is not None:
            _replace(dict(model.named_parameters()), weights, folder)
        self._score = Scorer(model, folder, share_prompts=share_prompts)

    @torch.inference_mode()
    def top(self, tokens: Tensor, wanted: Tensor, temperature: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """`logprobs`, and the k most likely tokens at each wanted position, int64 [R, T, k], with their log-probs."""
        return self._score.top(tokens, wanted, temperature, k)

    @torch.inference_mode()
    def logprobs(self, tokens: Tensor, wanted: Tensor, temperature: Tensor) -> Tensor:
        """float32 [R, T]: log-probs of `tokens` (int64 [R, T]) at `temperature` [R] where `wanted`, 0 elsewhere."""
        return self._score(tokens, wanted, temperature)[0]


def _replace(own: dict[str, torch.nn.Parameter], weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    left = set(own)
    for name, tensor in weights:
        if name not in own or own[name].shape != tensor.shape:
            raise ModelError(f"reference tensor '{name}' {tuple(tensor.shape)} does not fit {folder}")
        own[name].copy_(tensor)
        left.discard(name)
    if left:
        raise ModelError(f"reference weights lack {', '.join(sorted(left)[:5])}")

"""A frozen model that scores given tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from relax.training.token_logprobs import token_logprobs
from relax.training.torch_backend import load_model
from relax.types import ModelError


class ReferenceModel:
    """Loaded from a Hugging Face folder; `weights`, if given, replace every parameter."""

    def __init__(self, folder: Path, weights: Iterable[tuple[str, Tensor]] | None, trust_remote_code: bool = False):
        self._model = load_model(folder, trust_remote_code).eval().requires_grad_(False)
        if weights is not None:
            own = dict(self._model.named_parameters())
            given = set()
            for name, tensor in weights:
                if name not in own or own[name].shape != tensor.shape:
                    raise ModelError(f"reference tensor '{name}' {tuple(tensor.shape)} does not fit {folder}")
                own[name].copy_(tensor)
                given.add(name)
            if missing := sorted(set(own) - given):
                raise ModelError(f"reference weights lack {', '.join(missing[:5])}")

    @torch.inference_mode()
    def logprobs(self, tokens: Tensor, wanted: Tensor, temperature: Tensor) -> Tensor:
        """float32 [R, T]: log-probs of `tokens` (int64 [R, T]) at `temperature` [R] where `wanted`, 0 elsewhere."""
        rows, positions = wanted.nonzero(as_tuple=True)
        hidden = self._model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = self._model.get_output_embeddings()(hidden[rows, positions - 1])
        scale = torch.where(temperature > 0, temperature, 1.0)[rows]
        values, _ = token_logprobs(logits, tokens[rows, positions], scale)
        result = torch.zeros(tokens.shape, dtype=torch.float32)
        result[rows, positions] = values.float()
        return result

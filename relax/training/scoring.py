"""Log-probs of given tokens under an unmodified Hugging Face causal LM: one way, for trainer and reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relax.training.shared_prompts import pack
from relax.training.token_logprobs import token_logprobs, top_logprobs
from relax.types import ModelError


class ModelInputs:
    """Lays a batch out for a forward of the model, sharing prompts where asked for, legal and cheaper."""

    def __init__(self, model: Any, share_prompts: bool) -> None:
        self._width = int(model.config.hidden_size)
        # A packed sequence puts tokens further apart than they are: a window would cut them off.
        self._share_prompts = share_prompts and not getattr(model.config, "sliding_window", None)

    def __call__(self, tokens: Tensor, wanted: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """What enters the model, and int64 [N]: for each wanted token, in row-major order, the flat index of the
        hidden state that predicts it. tokens: int64 [R, T], right-padded; wanted: bool [R, T]."""
        packed = pack(tokens.cpu().numpy(), wanted.cpu().numpy(), self._width) if self._share_prompts else None
        if packed is None:
            # No mask: in a causal model right padding changes nothing before it, and without a mask the fast
            # attention kernels apply. The last column predicts nothing, so it stays out.
            rows, columns = wanted.nonzero(as_tuple=True)
            inputs = tokens[:, :-1]
            return {"input_ids": inputs}, rows * inputs.shape[1] + columns - 1
        device = tokens.device
        return {
            "input_ids": torch.from_numpy(packed.ids).to(device),
            "position_ids": torch.from_numpy(packed.positions).to(device),
            "attention_mask": torch.from_numpy(packed.mask).to(device),
        }, torch.from_numpy(packed.source).to(device)


class Scorer:
    """Owns a hook on the model's output layer, so that it runs only where a log-prob is asked for.

    The model's own scaling and capping of logits still applies. With `share_prompts` a prompt is computed once
    for all rows of a batch that begin with it, where that is cheaper; the model must take 4-D masks. Models with
    a sliding window get separate rows. `close` removes the hook.
    """

    def __init__(self, model: Any, folder: Path, *, autocast_bf16: bool = False, share_prompts: bool = False) -> None:
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Module):
            raise ModelError(f"{folder}: {type(model).__name__} names no output layer")
        self._model = model
        self._inputs = ModelInputs(model, share_prompts)
        self._autocast_bf16 = autocast_bf16
        self._selected: Tensor | None = None
        self._hook = layer.register_forward_pre_hook(self._select)

    def __call__(self, tokens: Tensor, wanted: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, float32 [R, T], where `wanted` (bool [R, T], false at position 0), 0 elsewhere.

        tokens: int64 [R, T], right-padded; temperature: float32 [R].
        """
        where = wanted.nonzero(as_tuple=True)
        logprobs, entropy = token_logprobs(self._logits(tokens, wanted), tokens[where], _scale(temperature, where))
        empty = torch.zeros(tokens.shape, device=tokens.device)
        return empty.index_put(where, logprobs), empty.index_put(where, entropy)

    def of_ids(self, tokens: Tensor, wanted: Tensor, temperature: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As a call, and the log-probs of the tokens `ids` (int64 [R, T, K]) at each position, float32 [R, T, K]."""
        where = wanted.nonzero(as_tuple=True)
        targets = torch.cat([tokens[where][:, None], ids[where]], dim=1)
        logprobs, entropy = token_logprobs(self._logits(tokens, wanted), targets, _scale(temperature, where))
        empty = torch.zeros(tokens.shape, device=tokens.device)
        others = torch.zeros(ids.shape, device=tokens.device).index_put(where, logprobs[:, 1:])
        return empty.index_put(where, logprobs[:, 0]), empty.index_put(where, entropy), others

    def top(self, tokens: Tensor, wanted: Tensor, temperature: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """As a call, and at each wanted position the k most likely tokens, int64 [R, T, k], with their log-probs,
        float32 [R, T, k]. No gradient."""
        where = wanted.nonzero(as_tuple=True)
        logits, scale = self._logits(tokens, wanted), _scale(temperature, where)
        logprobs, _ = token_logprobs(logits, tokens[where], scale)
        ids, tops = top_logprobs(logits, scale, k)
        shape = (*tokens.shape, k)
        return (
            torch.zeros(tokens.shape, device=tokens.device).index_put(where, logprobs),
            torch.zeros(shape, dtype=torch.int64, device=tokens.device).index_put(where, ids),
            torch.zeros(shape, device=tokens.device).index_put(where, tops),
        )

    def _logits(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """[N, V]: of each wanted token, in row-major order."""
        inputs, self._selected = self._inputs(tokens, wanted)
        try:
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self._autocast_bf16):
                logits: Tensor = self._model(**inputs, use_cache=False).logits
        finally:
            count, self._selected = len(self._selected), None
        if logits.shape[:2] != (1, count):
            raise ModelError(f"{type(self._model).__name__} does not call its output layer once, on the hidden states")
        return logits.squeeze(0)

    def close(self) -> None:
        self._hook.remove()

    def _select(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hand the output layer only the hidden states whose next token is asked for: [1, N, H]."""
        if self._selected is None:
            return args
        hidden = args[0]
        return (hidden.flatten(0, 1).index_select(0, self._selected).unsqueeze(0), *args[1:])


def _scale(temperature: Tensor, where: tuple[Tensor, ...]) -> Tensor:
    """float32 [N]. A greedy sample (temperature 0) carries log-probs at temperature 1."""
    return torch.where(temperature > 0, temperature, 1.0)[where[0]]

"""Batched forwards of an unmodified Hugging Face causal LM over the slot cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax.engines.kv_cache import SlotKVCache
from relax.types import FloatArray, IntArray, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelRunner:
    """Owns the model and its cache; only the decode thread calls its forwards.

    It uses the model's own `forward` with 4-D boolean masks and explicit positions, so any decoder that takes
    these works. Raises `ModelError` for attention that depends on more than the mask (sliding windows shorter
    than the context, or layers without keys and values).
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, max_context: int, device: torch.device) -> None:
        config = model.config
        _require_full_attention(model, max_context)
        if getattr(config, "_attn_implementation", "sdpa") != "sdpa":
            model.set_attn_implementation("sdpa")
        self.model = model.to(device).eval()
        self.device = device
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        heads = int(config.num_attention_heads)
        self.cache = SlotKVCache(
            layers=int(config.num_hidden_layers),
            slots=slots,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            max_context=max_context,
            dtype=model.dtype,
            device=device,
        )
        # transformers renamed `past_key_values` to `cache` in 5.x.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def prefill(self, first: int, sequences: Sequence[IntArray]) -> Tensor:
        """Logits [B, V] after each sequence (int32 [L], ragged), whose keys and values fill slots first, first + 1, ...

        Equal sequences, as in a group of samples, are computed once.
        """
        index: dict[bytes, int] = {}
        source = np.array([index.setdefault(s.tobytes(), len(index)) for s in sequences], dtype=np.int64)
        distinct = [np.frombuffer(key, dtype=np.int32) for key in index]
        lengths = np.array([len(s) for s in distinct], dtype=np.int64)
        width = int(lengths.max())
        start = width - lengths
        ids = np.zeros((len(distinct), width), dtype=np.int64)
        for row, sequence in enumerate(distinct):
            ids[row, start[row] :] = sequence
        positions = np.maximum(np.arange(width)[None] - start[:, None], 0)

        self.cache.reserve(width)
        source_rows = None if len(distinct) == len(sequences) else torch.from_numpy(source).to(self.device)
        self.cache.aim_prefill(first, source_rows, len(sequences), torch.from_numpy(lengths).to(self.device), width)
        logits = self._forward(ids, positions, self._prefill_mask(start, width))
        return logits if source_rows is None else logits[source_rows]

    def decode(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Tensor:
        """Logits [B, V] after one more token of each of the slots [0, B). tokens, positions: [B]."""
        span = int(positions.max()) + 1
        self.cache.reserve(span)
        where = torch.from_numpy(positions[:, None]).to(self.device)
        self.cache.aim_decode(where, span)
        mask = (torch.arange(span, device=self.device) <= where)[:, None, None, :]
        return self._forward(tokens[:, None], positions[:, None], mask)

    @torch.inference_mode()
    def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """float32 [T] each: log-prob of each token of a sequence (int32 [T]) at temperature 1, 0 at position 0.

        Sequences of one length share a forward, so none is padded.
        """
        scores: dict[int, FloatArray] = {}
        for length in {len(sequence) for sequence in sequences}:
            members = [k for k, sequence in enumerate(sequences) if len(sequence) == length]
            ids = torch.from_numpy(np.stack([sequences[k] for k in members]).astype(np.int64)).to(self.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            chosen = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[..., 0].cpu().numpy()
            for k, line in zip(members, chosen, strict=True):
                scores[k] = np.concatenate([np.zeros(1, np.float32), line])
        return [scores[k] for k in range(len(sequences))]

    def _prefill_mask(self, start: npt.NDArray[np.int64], width: int) -> Tensor:
        column = torch.arange(width, device=self.device)
        causal = column[None, :] <= column[:, None]
        if not start.any():
            return causal[None, None].expand(len(start), 1, width, width)
        real = column[None, :] >= torch.from_numpy(start[:, None]).to(self.device)
        # Padding attends to itself: a row of the mask without any true entry has an undefined softmax.
        return (causal & real[:, None, :] | torch.eye(width, dtype=torch.bool, device=self.device))[:, None]

    def _forward(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], mask: Tensor) -> Tensor:
        out = self.model(
            input_ids=torch.from_numpy(ids).to(self.device),
            position_ids=torch.from_numpy(positions).to(self.device),
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self.cache},
        )
        logits: Tensor = out.logits[:, -1]
        return logits


def _require_full_attention(model: PreTrainedModel, max_context: int) -> None:
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{type(model).__name__}: layers of type {sorted(kinds)} have no slot cache")
    slides = "sliding_attention" in kinds or (not kinds and window is not None)
    if slides and window is not None and window < max_context:
        raise ModelError(
            f"{type(model).__name__}: sliding window of {window} tokens is below the context {max_context}"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_context > limit:
        raise ModelError(f"{type(model).__name__}: context {max_context} exceeds max_position_embeddings {limit}")

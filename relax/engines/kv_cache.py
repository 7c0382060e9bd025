"""Keys and values of the running sequences, one slot each, behind the interface of transformers' `Cache`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class SlotKVCache(Cache):  # type: ignore[misc]
    """Per layer one key and one value tensor [slots, kv_heads, S + 1, D].

    Position p of a sequence lies at index p of its slot; the last index takes what padding writes
    and is never read. S starts at `initial` and doubles up to `max_context` as sequences grow, so an
    engine pays for the lengths it sees. Before each forward the caller states what the forward
    writes, by `aim_prefill` or `aim_decode`.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        initial: int = 64,
    ) -> None:
        super().__init__(layers=[])
        self.max_context = max_context
        self.capacity = min(initial, max_context)
        shape = (slots, kv_heads, self.capacity + 1, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._slots = slice(0, 0)
        self._source: Tensor | None = None
        self._write: tuple[Any, ...] = ()
        self._span: int | None = None

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens. Raises `ValueError` beyond `max_context`."""
        if length > self.max_context:
            raise ValueError(f"a sequence of {length} tokens exceeds the context of {self.max_context}")
        if length <= self.capacity:
            return
        old, self.capacity = self.capacity, min(max(length, 2 * self.capacity), self.max_context)
        for store in (self.keys, self.values):
            for layer, tensor in enumerate(store):
                slots, heads, _, dim = tensor.shape
                grown = tensor.new_zeros(slots, heads, self.capacity + 1, dim)
                grown[:, :, :old] = tensor[:, :, :old]
                store[layer] = grown

    def aim_prefill(self, first: int, source: Tensor | None, count: int, lengths: Tensor, width: int) -> None:
        """The next forward holds whole sequences, left-padded to `width`, lengths int64 [B].

        Slots [first, first + count) receive row source[i] (int64 [count]; None: row i). Attention reads
        the given keys only.
        """
        self._slots = slice(first, first + count)
        self._source = source
        self._span = None
        if bool((lengths == width).all()):
            self._write = (self._slots, slice(None), slice(0, width))
            return
        lengths = lengths if source is None else lengths[source]
        positions = torch.arange(width, device=lengths.device) - (width - lengths)[:, None]
        positions = torch.where(positions < 0, self.capacity, positions)
        rows = torch.arange(first, first + count, device=lengths.device)[:, None]
        self._write = (rows, slice(None), positions)

    def aim_decode(self, positions: Tensor, span: int) -> None:
        """The next forward holds one token of each of the slots [0, B) at `positions` (int64 [B, 1]) below `span`."""
        self._slots = slice(0, len(positions))
        self._source = None
        self._span = span
        self._write = (torch.arange(len(positions), device=positions.device)[:, None], slice(None), positions)

    def move(self, source: Tensor, target: Tensor, span: int) -> None:
        """Copy the first `span` positions of slots `source` over those of `target` (int64 [M] each, disjoint)."""
        for store in (self.keys, self.values):
            for tensor in store:
                tensor[target, :, :span] = tensor[source, :, :span]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Called by the model: store [B, kv_heads, T, D] and return what attention reads."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        new_keys, new_values = key_states, value_states
        if self._source is not None:
            new_keys, new_values = key_states[self._source], value_states[self._source]
        if not isinstance(self._write[2], slice):
            # An index list on both sides of a slice puts the slice last: [B, T, heads, D].
            new_keys, new_values = new_keys.transpose(1, 2), new_values.transpose(1, 2)
        keys[self._write], values[self._write] = new_keys, new_values
        if self._span is None:
            return key_states, value_states
        return keys[self._slots, :, : self._span], values[self._slots, :, : self._span]

    # The forward gets positions and a finished 4-D mask, so it never needs a length from here.
    def get_seq_length(self, layer_idx: int = 0, *args: object, **kwargs: object) -> int:
        return 0

    def get_mask_sizes(self, *args: object, **kwargs: object) -> tuple[int, int]:
        return self._span or 0, 0

    def __len__(self) -> int:
        return len(self.keys)

"""Token draws, one per row, and their log-probs.

A draw is the inverse of the cumulative distribution at one uniform number, and that number is a
hash of (seed, position). So a row's token depends on its own logits, seed and position, never on
its batch-mates, and costs no generator object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax.types import SamplingParams

SeedArray = npt.NDArray[np.uint64]

# SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", fig. 16).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SEED_MASK = (1 << 64) - 1


def _mix(z: SeedArray) -> SeedArray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def fold_seed(seed: int) -> int:
    """Any integer as an unsigned 64-bit seed."""
    return seed & _SEED_MASK


def uniforms(seeds: SeedArray, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row from (seed, position) alone. seeds uint64 [N], positions int64 [N]."""
    # The seed is mixed first: else seed + 1 at one position would repeat seed at the next.
    state = _mix(seeds + _GAMMA) + positions.astype(np.uint64) * _GAMMA
    # 52 bits, so that u x total stays below total after rounding.
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Settings of N rows as tensors, made once per batch composition. None: the setting is off in every row.

    temperature: float32 [N, 1], 1 in greedy rows; greedy: bool [N]; truncated: int64 [M], the rows
    with top-k or top-p; top_k: int64 [M, 1] (the vocabulary size when off); top_p: float64 [M, 1].
    """

    temperature: Tensor | None
    greedy: Tensor | None
    all_greedy: bool
    truncated: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None

    @classmethod
    def build(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingRows:
        t = np.array([p.temperature for p in params], dtype=np.float32)
        k = np.array([p.top_k for p in params], dtype=np.int64)
        p = np.array([p.top_p for p in params], dtype=np.float64)
        return cls.from_arrays(t, k, p, vocab_size, device)

    @classmethod
    def from_arrays(
        cls,
        temperature: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int64],
        top_p: npt.NDArray[np.float64],
        vocab_size: int,
        device: torch.device,
    ) -> SamplingRows:
        greedy = temperature == 0
        t = np.where(greedy, np.float32(1), temperature)
        k = np.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k)
        cut = np.flatnonzero(((k < vocab_size) | (top_p < 1)) & ~greedy)
        return cls(
            temperature=torch.from_numpy(t[:, None]).to(device) if (t != 1).any() else None,
            greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
            all_greedy=bool(greedy.all()),
            truncated=torch.from_numpy(cut).to(device) if len(cut) else None,
            top_k=torch.from_numpy(k[cut, None]).to(device) if len(cut) else None,
            top_p=torch.from_numpy(top_p[cut, None]).to(device) if len(cut) else None,
        )


def _truncate(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero what top-k, then top-p over the renormalised rest, remove. probs float32 [M, V]; always keeps the best.

    Top-p keeps the smallest set of the most likely tokens whose mass reaches p (Holtzman et al. 2019, eq. 2).
    """
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.double().masked_fill_(torch.arange(probs.shape[-1], device=probs.device) >= top_k, 0)
    total = ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered
    dropped = (before >= top_p * total) | (ordered == 0)
    dropped[:, 0] = False
    return probs.masked_fill(torch.zeros_like(dropped).scatter_(-1, index, dropped), 0)


def sample(logits: Tensor, rows: SamplingRows, u: npt.NDArray[np.float64]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row. logits [N, V] in any float dtype, u float64 [N] from `uniforms`.

    Returns (tokens int64 [N], log-probs float32 [N] of `LogprobMode.TEMPERATURE`, the same of
    `LogprobMode.SAMPLING`). Greedy rows have both at temperature 1, untruncated. The arithmetic is float32,
    the cumulative sum float64: in float32 the tail of a large vocabulary could not be drawn.
    """
    z = logits.float()
    if rows.temperature is not None:
        z = z / rows.temperature
    logp = torch.log_softmax(z, dim=-1)
    if rows.all_greedy:
        tokens = logits.argmax(dim=-1)
        chosen = logp.gather(-1, tokens[:, None])[:, 0]
        return tokens, chosen, chosen
    probs = logp.exp()
    if rows.truncated is not None:
        assert rows.top_k is not None and rows.top_p is not None
        probs[rows.truncated] = _truncate(probs[rows.truncated], rows.top_k, rows.top_p)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    mass = cumulative[:, -1:]
    target = torch.from_numpy(u[:, None]).to(logits.device) * mass
    drawn = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if rows.greedy is not None:
        drawn = torch.where(rows.greedy[:, None], logits.argmax(dim=-1, keepdim=True), drawn)
    chosen = logp.gather(-1, drawn)[:, 0]
    sampling = chosen
    if rows.truncated is not None:
        sampling = chosen.clone()
        sampling[rows.truncated] -= mass[rows.truncated, 0].log().float()
    return drawn[:, 0], chosen, sampling

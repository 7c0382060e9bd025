"""Rows that begin with the same prompt, laid out so that the prompt is computed once.

    rows      P a b c     P d e        one sequence   P a b d          (the last token predicts nothing)
                                       positions      0 1 2 1          (for a prompt of one token)
    mask      every response sees the prompt and itself, never another response

The numbers are those of the separate rows, up to rounding: a token attends to the same keys at the same
positions. A prompt is what comes before a row's first wanted token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LINEAR_SHARE = 6
"""Attention over L keys costs about L / (6 x width) of a transformer layer's matrix products."""


@dataclass(frozen=True, slots=True)
class Packed:
    """G sequences of L tokens. ids, positions: int64 [G, L]; mask: bool [G, 1, L, L], true where attended;
    source: int64 [N], for each wanted token (in row-major order) the flat index of the position before it."""

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    source: npt.NDArray[np.int64]


def by_prompt(rows: Sequence[npt.NDArray[np.integer]], starts: Sequence[int]) -> list[list[int]]:
    """Indices of the rows that share a prompt, in order of first appearance. `starts`: length of each prompt."""
    groups: dict[bytes, list[int]] = {}
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        groups.setdefault(row[:start].tobytes(), []).append(index)
    return list(groups.values())


def cost(sequences: int, length: int, width: int) -> float:
    """Of a forward, in tokens through the matrix products; `width` is the model's hidden size."""
    return sequences * length * (1 + length / (LINEAR_SHARE * width))


def pack(tokens: npt.NDArray[np.int64], wanted: npt.NDArray[np.bool_], width: int) -> Packed | None:
    """None when separate rows (tokens [R, T], right-padded, T - 1 of them enter the model) are cheaper.

    wanted: bool [R, T], false at position 0, at least one true in each row.
    """
    starts = wanted.argmax(1)
    ends = wanted.shape[1] - wanted[:, ::-1].argmax(1)  # one past the last wanted token
    groups = by_prompt(list(tokens), starts.tolist())
    # Each response enters without its last token.
    lengths = [int(starts[rows[0]]) + int((ends[rows] - starts[rows] - 1).sum()) for rows in groups]
    if cost(len(groups), max(lengths), width) >= cost(len(tokens), tokens.shape[1] - 1, width):
        return None
    shape = (len(groups), max(lengths))
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    owner = np.full(shape, -1, np.int64)  # 0: the prompt; k: the k-th response; -1: padding
    before = np.zeros(tokens.shape, np.int64)
    for g, rows in enumerate(groups):
        start = int(starts[rows[0]])
        ids[g, :start] = tokens[rows[0], :start]
        positions[g, :start] = np.arange(start)
        owner[g, :start] = 0
        offset = start
        for k, row in enumerate(rows, 1):
            length = int(ends[row]) - start - 1
            ids[g, offset : offset + length] = tokens[row, start : start + length]
            positions[g, offset : offset + length] = np.arange(start, start + length)
            owner[g, offset : offset + length] = k
            before[row, start] = g * shape[1] + start - 1
            before[row, start + 1 : start + 1 + length] = g * shape[1] + np.arange(offset, offset + length)
            offset += length
    seen = (owner[:, None, :] == 0) | (owner[:, None, :] == owner[:, :, None])
    # Padding attends to itself and its like: a row of the mask without a true entry has no softmax.
    mask = np.tril(seen & ((owner >= 0)[:, None, :] | (owner < 0)[:, :, None]))
    return Packed(ids, positions, mask[:, None], before[wanted])

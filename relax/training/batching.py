"""From training rows to padded micro-batches: pure and deterministic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax.training.base import OPTIONAL_COLUMNS, TrainBatch
from relax.training.shared_prompts import by_prompt
from relax.types import NO_VERSION, BoolArray, FloatArray, IntArray, PolicyVersion, group_of


@dataclass(frozen=True, slots=True, eq=False)
class TrainRow:
    """One row ready to train; all arrays [T] and aligned with `tokens` as in `TrainBatch`.

    tokens, versions: int32; loss_mask: bool, false at 0; rollout_logprobs and the optional columns: float32;
    temperature: of the sampling; reward: of the row's sample; advantage: of every sampled token, or float32 [T].
    """

    row_id: str
    tokens: IntArray
    loss_mask: BoolArray
    rollout_logprobs: FloatArray
    versions: IntArray
    temperature: float
    reward: float = 0.0
    advantage: float | FloatArray = 0.0
    ref_logprobs: FloatArray | None = None
    proximal_logprobs: FloatArray | None = None
    values: FloatArray | None = None
    returns: FloatArray | None = None
    token_weights: FloatArray | None = None
    teacher_logprobs: FloatArray | None = None
    teacher_topk_ids: IntArray | None = None
    teacher_topk_logprobs: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def plan_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of rows per batch; rows x longest row <= `budget` (padded tokens), rows never split.

    A row longer than the budget is alone. Rows of a batch are of similar length: none is shorter than half
    of the longest, which bounds padding and costs at most log2(longest / shortest) more batches. Longest
    first, so that a batch that does not fit into memory fails at once; ties keep the given order.
    """
    plan: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        fits = bool(plan) and (len(plan[-1]) + 1) * longest <= budget and 2 * length >= longest
        if fits:
            plan[-1].append(index)
        else:
            plan.append([index])
            longest = length
    return plan


def plan_shared(rows: Sequence[TrainRow], budget: int) -> list[list[int]]:
    """As `plan_batches`, for rows whose prompt is computed once for all rows of a batch that begin with it.

    Rows with one prompt stay together: they count as the prompt and their responses, and are divided only where
    that alone exceeds the budget.
    """
    starts = [int(row.loss_mask.argmax()) for row in rows]
    units: list[list[int]] = []
    lengths: list[int] = []
    for group in by_prompt([row.tokens for row in rows], starts):
        start = starts[group[0]]
        room = 0
        for index in group:
            response = len(rows[index]) - start
            if room >= response:
                units[-1].append(index)
                lengths[-1] += response
                room -= response
            else:
                units.append([index])
                lengths.append(start + response)
                room = budget - lengths[-1]
    return [[index for unit in batch for index in units[unit]] for batch in plan_batches(lengths, budget)]


def plan_groups(rows: Sequence[TrainRow], budget: int) -> list[list[int]]:
    """As `plan_batches`, with all rows of a group in one batch, above the budget if one group alone is."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[group_of(row.row_id)].append(index)
    units = list(groups.values())
    lengths = [len(unit) * max(len(rows[i]) for i in unit) for unit in units]
    return [[index for unit in batch for index in units[unit]] for batch in plan_batches(lengths, budget)]


def make_batches(
    rows: Sequence[TrainRow],
    micro_batch_tokens: int,
    pad_id: int = 0,
    *,
    share_prompts: bool = False,
    whole_groups: bool = False,
    version: PolicyVersion = NO_VERSION,
) -> Iterator[TrainBatch]:
    """Padded CPU batches under the budget; the same set of rows gives the same batches in any order.

    `share_prompts`: the budget counts a prompt once for the rows that begin with it (`Scorer`). `whole_groups`:
    a group is never divided, as losses over pairs need. Raises `ValueError` for unequal array lengths, a row
    without a sampled token or with one at position 0, and when only some rows have an optional column.
    """
    ordered = sorted(rows, key=lambda row: row.row_id)
    for row in ordered:
        _check(row)
    for name in OPTIONAL_COLUMNS:
        if len({getattr(row, name) is None for row in ordered}) > 1:
            raise ValueError(f"some rows have {name} and some have none")
    if whole_groups:
        plan = plan_groups(ordered, micro_batch_tokens)
    elif share_prompts:
        plan = plan_shared(ordered, micro_batch_tokens)
    else:
        plan = plan_batches([len(row) for row in ordered], micro_batch_tokens)
    for indices in plan:
        yield _pad([ordered[i] for i in indices], pad_id, version)


def _check(row: TrainRow) -> None:
    arrays = [row.loss_mask, row.rollout_logprobs, row.versions]
    arrays += [column for name in OPTIONAL_COLUMNS if (column := getattr(row, name)) is not None]
    if isinstance(row.advantage, np.ndarray):
        arrays.append(row.advantage)
    if any(len(array) != len(row) for array in arrays):
        raise ValueError(f"row {row.row_id}: arrays of lengths {[len(row), *map(len, arrays)]}")
    if not row.loss_mask.any():
        raise ValueError(f"row {row.row_id}: no sampled token")
    if row.loss_mask[0]:
        raise ValueError(f"row {row.row_id}: the first token cannot be a sampled one, nothing predicts it")


def _pad(rows: Sequence[TrainRow], pad_id: int, version: PolicyVersion) -> TrainBatch:
    lengths = np.array([len(row) for row in rows])
    attention = np.arange(lengths.max()) < lengths[:, None]

    def fill(arrays: Sequence[npt.NDArray[np.generic]], dtype: npt.DTypeLike, padding: float = 0) -> Tensor:
        out = np.full((*attention.shape, *arrays[0].shape[1:]), padding, dtype=dtype)
        out[attention] = np.concatenate(arrays)
        return torch.from_numpy(out)

    loss_mask = fill([row.loss_mask for row in rows], np.bool_)
    advantages = fill([np.broadcast_to(np.float32(row.advantage), len(row)) for row in rows], np.float32)
    optional = {
        name: fill([getattr(row, name) for row in rows], np.int64 if name.endswith("_ids") else np.float32)
        for name in OPTIONAL_COLUMNS
        if getattr(rows[0], name) is not None
    }
    return TrainBatch(
        tokens=fill([row.tokens for row in rows], np.int64, pad_id),
        attention_mask=torch.from_numpy(attention),
        loss_mask=loss_mask,
        temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        advantages=advantages * loss_mask,
        rollout_logprobs=fill([row.rollout_logprobs for row in rows], np.float32),
        versions=fill([row.versions for row in rows], np.int32, -1),
        version=version,
        row_ids=tuple(row.row_id for row in rows),
        group_ids=tuple(group_of(row.row_id) for row in rows),
        **optional,
    )

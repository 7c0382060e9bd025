from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax.training.batching import TrainRow, make_batches, plan_batches

MakeRows = Callable[..., list[TrainRow]]


@given(lengths=st.lists(st.integers(2, 200), max_size=60), budget=st.integers(1, 1000))
def test_every_row_is_in_one_batch_under_the_budget(lengths: list[int], budget: int) -> None:
    """behaviour: B25. A batch over the budget is a single long row; padding is under half."""
    plan = plan_batches(lengths, budget)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    for batch in plan:
        longest = max(lengths[index] for index in batch)
        assert len(batch) * longest <= budget or len(batch) == 1
        assert min(lengths[index] for index in batch) * 2 >= longest


def test_padding_golden() -> None:
    """behaviour: B23. Two rows of 4 and 3 tokens, written out."""
    rows = [
        TrainRow(
            row_id="toy:0:1/0/0",
            tokens=np.array([5, 6, 7, 8], np.int32),
            loss_mask=np.array([False, False, True, True]),
            rollout_logprobs=np.array([0, 0, -1, -2], np.float32),
            versions=np.array([-1, -1, 3, 4], np.int32),
            temperature=0.5,
            advantage=2.0,
        ),
        TrainRow(
            row_id="toy:0:2/0/0",
            tokens=np.array([1, 2, 3], np.int32),
            loss_mask=np.array([False, True, False]),
            rollout_logprobs=np.array([0, -3, 0], np.float32),
            versions=np.array([-1, 3, -1], np.int32),
            temperature=1.0,
            advantage=-1.0,
        ),
    ]
    (batch,) = make_batches(rows, 100, pad_id=9)
    assert batch.tokens.tolist() == [[5, 6, 7, 8], [1, 2, 3, 9]]
    assert batch.attention_mask.tolist() == [[True] * 4, [True, True, True, False]]
    assert batch.loss_mask.tolist() == [[False, False, True, True], [False, True, False, False]]
    assert batch.rollout_logprobs.tolist() == [[0, 0, -1, -2], [0, -3, 0, 0]]
    assert batch.versions.tolist() == [[-1, -1, 3, 4], [-1, 3, -1, -1]]
    assert batch.advantages.tolist() == [[0, 0, 2, 2], [0, -1, 0, 0]]
    assert batch.temperature.tolist() == [0.5, 1.0]
    assert batch.ref_logprobs is None
    assert (batch.row_ids, batch.group_ids) == (("toy:0:1/0/0", "toy:0:2/0/0"), ("toy:0:1", "toy:0:2"))
    assert batch.n_tokens == 3
    assert (batch.tokens.dtype, batch.versions.dtype, batch.advantages.dtype) == (
        torch.int64,
        torch.int32,
        torch.float32,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: replace(row, versions=row.versions[:-1]), "lengths"),
        (lambda row: replace(row, loss_mask=np.zeros(len(row), bool)), "no sampled token"),
        (lambda row: replace(row, loss_mask=np.ones(len(row), bool)), "first token"),
        (lambda row: replace(row, ref_logprobs=None), "ref_logprobs"),
    ],
)
def test_malformed_rows_are_refused(change: Callable[[TrainRow], TrainRow], words: str, make_rows: MakeRows) -> None:
    """behaviour: B23."""
    good, bad = make_rows(2)
    with pytest.raises(ValueError, match=words):
        list(make_batches([good, change(bad)], 100))

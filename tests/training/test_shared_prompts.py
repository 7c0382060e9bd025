"""A prompt that is computed once for its samples gives what separate rows give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax.algorithms import build_loss
from relax.config.algorithm import AlgorithmConfig
from relax.training.batching import TrainRow, make_batches, plan_shared
from relax.training.shared_prompts import pack
from relax.training.torch_backend import TorchBackend

WIDTH = 32
OPTIM = {"eps": 1e-3, "lr": 1e-2, "clip_grad_norm": None}


@pytest.fixture
def rows(make_rows: Callable[..., list[TrainRow]]) -> list[TrainRow]:
    """Four groups of three: long prompts, short answers of unequal length, one of a single token."""
    draw = np.random.default_rng(0)
    found = []
    for index, row in enumerate(make_rows(12, lengths=(5, 10))):
        prompt = np.random.default_rng(index // 3).integers(0, 16, 9).astype(np.int32)
        answer = draw.integers(0, 16, 1 + index % 3 + index // 6).astype(np.int32)
        mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
        found.append(
            replace(
                row,
                tokens=np.concatenate([prompt, answer]),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, -2.0, 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                ref_logprobs=np.where(mask, -2.5, 0).astype(np.float32),
            )
        )
    return found


def entered(backend: TorchBackend) -> list[int]:
    """Tokens of each forward."""
    sizes: list[int] = []
    backend._model.get_input_embeddings().register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    return sizes


def test_log_probs_and_gradients_are_those_of_separate_rows(
    make_backend: Callable[..., TorchBackend], rows: list[TrainRow]
) -> None:
    """behaviour: B25"""
    outcomes: dict[bool, Any] = {}
    for share in (False, True):
        backend = make_backend(OPTIM, share_prompts=share)
        sizes = entered(backend)
        gradients: dict[str, torch.Tensor] = {}

        def record(*_: object, backend: TorchBackend = backend, into: dict[str, torch.Tensor] = gradients) -> None:
            into.update({name: p.grad.clone() for name, p in backend._model.named_parameters()})

        backend._optimizer.register_step_pre_hook(record)
        batches = make_batches(rows, 64, share_prompts=share)
        result = backend.step(batches, build_loss(AlgorithmConfig(kl={"coef": 0.1}, entropy_coef=0.01)))
        outcomes[share] = (result, gradients, sum(sizes))
    separate, shared = outcomes[False], outcomes[True]
    assert shared[0].loss == pytest.approx(separate[0].loss, abs=1e-6)
    assert shared[0].stats["entropy"] == pytest.approx(separate[0].stats["entropy"], abs=1e-6)
    for name, gradient in separate[1].items():
        torch.testing.assert_close(shared[1][name], gradient, atol=1e-6, rtol=1e-5)
    assert shared[2] < 0.7 * separate[2], "the prompts were not shared"


def test_rows_with_different_temperatures_keep_theirs(
    make_backend: Callable[..., TorchBackend], rows: list[TrainRow]
) -> None:
    """behaviour: B7"""
    (batch,) = make_batches(rows, 10_000)
    values = [
        make_backend(share_prompts=share)._score(batch.tokens, batch.loss_mask, batch.temperature)[0].detach()
        for share in (False, True)
    ]
    assert len(set(batch.temperature.tolist())) == len(rows)
    torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=0)


def test_unrelated_rows_stay_separate() -> None:
    tokens = np.arange(24).reshape(3, 8)
    assert pack(tokens, np.arange(8)[None] >= np.full((3, 1), 4), WIDTH) is None


def test_long_answers_to_a_short_prompt_stay_separate_because_attention_would_cost_more() -> None:
    tokens = np.zeros((16, 1000), np.int64)
    wanted = np.broadcast_to(np.arange(1000) >= 50, tokens.shape)
    assert pack(tokens, wanted, WIDTH) is None


def test_a_packed_token_sees_its_prompt_and_its_own_answer_only() -> None:
    """behaviour: B26"""
    tokens = np.array([[7, 8, 9, 1, 2, 3, 0], [7, 8, 9, 4, 5, 0, 0], [7, 8, 9, 6, 0, 0, 0]])
    wanted = np.zeros(tokens.shape, bool)
    wanted[0, 3:6] = wanted[1, 3:5] = wanted[2, 3:4] = True
    packed = pack(tokens, wanted, WIDTH)
    assert packed is not None
    assert packed.ids.tolist() == [[7, 8, 9, 1, 2, 4]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert packed.source.tolist() == [2, 3, 4, 2, 5, 2]
    assert packed.mask[0, 0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=20), st.integers(4, 60))
def test_a_plan_holds_every_row_once_and_its_budget(sizes: list[tuple[int, int]], budget: int) -> None:
    rows = []
    for index, (prompt, answer) in enumerate(sizes):
        tokens = np.array([prompt] * 5 + [index] * answer, np.int32)
        mask = np.arange(len(tokens)) >= 5
        zeros = np.zeros(len(tokens), np.float32)
        rows.append(TrainRow(f"toy:0:{prompt}/{index}/0", tokens, mask, zeros, zeros.astype(np.int32), 1.0, 0.0))
    plan = plan_shared(rows, budget)
    assert sorted(index for batch in plan for index in batch) == list(range(len(rows)))
    for batch in plan:
        prompts = {sizes[index][0] for index in batch}
        packed = 5 * len(prompts) + sum(sizes[index][1] for index in batch)
        assert packed <= budget or len(batch) == 1

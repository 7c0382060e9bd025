"""One step is the same however its rows are cut, packed, ordered and delivered."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from relax.algorithms import build_loss
from relax.config.algorithm import AlgorithmConfig
from relax.training.base import StepResult, TrainBatch
from relax.training.batching import TrainRow, make_batches
from relax.training.torch_backend import TorchBackend

WHOLE = 10_000
# Adam divides by |gradient| + eps: with a tiny eps it would blow up the rounding of gradients near 0.
OPTIM = {"eps": 1e-3, "lr": 1e-2, "clip_grad_norm": None}

Outcome = tuple[StepResult, dict[str, torch.Tensor], dict[str, torch.Tensor]]


def train_once(make_backend: Callable[..., TorchBackend], batches: Iterable[TrainBatch], algorithm: Any) -> Outcome:
    """Result, gradients as the optimizer saw them, and updated parameters."""
    backend = make_backend(OPTIM)
    gradients: dict[str, torch.Tensor] = {}

    def record(*_: object) -> None:
        for name, parameter in backend._model.named_parameters():
            gradients[name] = parameter.grad.clone()

    backend._optimizer.register_step_pre_hook(record)
    result = backend.step(batches, build_loss(algorithm))
    return result, gradients, {name: tensor.clone() for name, tensor in backend.state_tensors()}


def row_by_row(rows: list[TrainRow]) -> Iterator[TrainBatch]:
    for row in rows:
        yield from make_batches([row], WHOLE)


def shuffled(rows: list[TrainRow], seed: int) -> list[TrainRow]:
    return random.Random(seed).sample(rows, len(rows))


def cut(rows: list[TrainRow], way: str) -> Iterable[TrainBatch]:
    match way:
        case "micro_batches":
            return list(make_batches(rows, 24))
        case "row_by_row":
            return row_by_row(rows)
        case "row_by_row_shuffled":
            return row_by_row(shuffled(rows, 3))
        case "streamed_by_group":
            return (batch for i in range(0, len(rows), 3) for batch in make_batches(rows[i : i + 3], 40))
        case "repacked_in_reverse":
            return reversed(list(make_batches(shuffled(rows, 5), 33)))
        case _:
            raise AssertionError(way)


@pytest.mark.parametrize(
    "way", ["micro_batches", "row_by_row", "row_by_row_shuffled", "streamed_by_group", "repacked_in_reverse"]
)
def test_loss_gradient_and_update_equal_those_of_one_batch(
    way: str,
    algorithm: AlgorithmConfig,
    make_backend: Callable[..., TorchBackend],
    make_rows: Callable[..., list[TrainRow]],
) -> None:
    """behaviour: B25. To 1e-6 in float32."""
    rows = make_rows(12)
    whole = list(make_batches(rows, WHOLE))
    assert len(whole) == 1
    expected, expected_gradients, expected_parameters = train_once(make_backend, whole, algorithm)
    result, gradients, parameters = train_once(make_backend, cut(rows, way), algorithm)

    assert max(g.abs().max().item() for g in expected_gradients.values()) > 1e-3
    assert result.loss == pytest.approx(expected.loss, abs=1e-6)
    assert result.grad_norm == pytest.approx(expected.grad_norm, abs=1e-6, rel=1e-6)
    assert (result.n_rows, result.n_tokens) == (expected.n_rows, expected.n_tokens)
    assert result.stats == pytest.approx(dict(expected.stats), abs=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=0)
        torch.testing.assert_close(parameters[name], expected_parameters[name], atol=1e-6, rtol=0)


def test_the_optimizer_sees_the_gradient_of_the_mean_loss(
    model_folder: Path, make_backend: Callable[..., TorchBackend], make_rows: Callable[..., list[TrainRow]]
) -> None:
    """behaviour: B25. The scale is asserted on gradients, because Adam hides a wrong one: that of
    -advantage x log-prob, mean over sampled tokens, by plain autograd through the whole distribution."""
    from transformers import AutoModelForCausalLM

    rows = make_rows(4)
    algorithm = AlgorithmConfig(name="dapo", behaviour="trainer")
    _, gradients, _ = train_once(make_backend, make_batches(rows, 16), algorithm)

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    (batch,) = make_batches(rows, WHOLE)
    logits = model(input_ids=batch.tokens, attention_mask=batch.attention_mask.long()).logits[:, :-1]
    distribution = (logits / batch.temperature[:, None, None]).log_softmax(-1)
    logprobs = distribution.gather(2, batch.tokens[:, 1:, None]).squeeze(2)
    (-(batch.advantages[:, 1:] * logprobs)[batch.loss_mask[:, 1:]].mean()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-5)


def test_the_same_rows_give_the_same_batches_in_any_order(make_rows: Callable[..., list[TrainRow]]) -> None:
    """behaviour: B25. So a step collected in another order is bit-equal."""
    rows = make_rows(9)
    first = [batch.row_ids for batch in make_batches(rows, 30)]
    assert len(first) > 1
    assert [batch.row_ids for batch in make_batches(shuffled(rows, 1), 30)] == first

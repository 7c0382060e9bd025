from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from relax.algorithms import build_loss
from relax.config.algorithm import AlgorithmConfig
from relax.training.base import LossFn, LossOutput, NonFiniteUpdate, StepResult, TrainBatch
from relax.training.batching import TrainRow, make_batches
from relax.training.torch_backend import TorchBackend

LOSS = build_loss(AlgorithmConfig(name="dapo"))
REF_LOSS = build_loss(AlgorithmConfig(name="grpo", kl={"coef": 0.1}))

MakeBackend = Callable[..., TorchBackend]
MakeRows = Callable[..., list[TrainRow]]


def state_bytes(backend: TorchBackend) -> bytes:
    buffer = io.BytesIO()
    torch.save([dict(backend.state_tensors()), backend._optimizer.state_dict(), backend._updates], buffer)
    return buffer.getvalue()


def infinite_gradient(batch: TrainBatch, logprobs: Tensor, _entropy: Tensor) -> LossOutput:
    """Loss 0 with slope infinity: only the gradient is bad."""
    return LossOutput((logprobs - logprobs.detach()).sqrt().sum(), float(batch.n_tokens))


def infinite_loss(_batch: TrainBatch, logprobs: Tensor, _entropy: Tensor) -> LossOutput:
    return LossOutput(logprobs.sum() * 0 + math.inf, 1.0)


def spoil(row: TrainRow, field: str, value: float) -> TrainRow:
    array = getattr(row, field)
    return replace(row, **{field: np.where(row.loss_mask, value, array).astype(np.float32)})


@pytest.mark.parametrize(
    ("change", "loss", "words"),
    [
        (lambda row: row, infinite_loss, "loss"),
        (lambda row: row, infinite_gradient, "gradient"),
        (lambda row: replace(row, advantage=math.nan), LOSS, "advantage"),
        (lambda row: spoil(row, "rollout_logprobs", math.nan), LOSS, "rollout log-prob"),
        # Clipping would hide this one from the loss.
        (lambda row: replace(spoil(row, "rollout_logprobs", -math.inf), advantage=1.0), LOSS, "rollout log-prob"),
        (lambda row: spoil(row, "ref_logprobs", -math.inf), REF_LOSS, "ref_logprobs"),
        # Divides the logits into infinities.
        (lambda row: replace(row, temperature=1e-44), LOSS, "trainer log-prob"),
    ],
)
def test_a_nonfinite_number_changes_nothing_and_raises(
    change: Callable[[TrainRow], TrainRow],
    loss: LossFn,
    words: str,
    make_backend: MakeBackend,
    make_rows: MakeRows,
) -> None:
    """behaviour: B45. Parameters, moments and schedule stay bit-equal, and the next step is as if nothing had
    been tried: no gradient of the broken step is left."""
    backend, untouched = make_backend({"warmup_steps": 5}), make_backend({"warmup_steps": 5})
    rows = make_rows(6)
    for each in (backend, untouched):
        each.step(make_batches(rows, 30), LOSS)
    before = state_bytes(backend)

    def stream() -> Iterator[TrainBatch]:
        yield from make_batches(rows[:5], 30)
        yield from make_batches([change(rows[5])], 30)

    with pytest.raises(NonFiniteUpdate, match=words):
        backend.step(stream(), loss)
    assert state_bytes(backend) == before
    assert comparable(backend.step(make_batches(rows, 30), LOSS)) == comparable(
        untouched.step(make_batches(rows, 30), LOSS)
    )
    assert state_bytes(backend) == state_bytes(untouched)


def test_an_error_of_the_stream_passes_through_and_discards_the_gradients(
    make_backend: MakeBackend, make_rows: MakeRows
) -> None:
    """behaviour: B45. A step that broke off in the middle leaves no gradient behind."""
    backend, untouched = make_backend(), make_backend()
    rows = make_rows(6)

    def stream() -> Iterator[TrainBatch]:
        yield from make_batches(rows, 30)
        raise ConnectionResetError("the bus is gone")

    with pytest.raises(ConnectionResetError, match="the bus is gone"):
        backend.step(stream(), LOSS)
    for each in (backend, untouched):
        each.step(make_batches(rows, 30), LOSS)
    assert state_bytes(backend) == state_bytes(untouched)


def test_an_empty_stream_is_an_error(make_backend: MakeBackend) -> None:
    """behaviour: B14. An empty step is never counted as one."""
    with pytest.raises(ValueError, match="no batch"):
        make_backend().step(iter(()), LOSS)


def comparable(result: StepResult) -> StepResult:
    return replace(result, compute_s=0.0)

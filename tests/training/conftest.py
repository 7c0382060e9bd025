"""A tiny Qwen3 with random weights, rows for it, and backends over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.config.actor import ActorConfig, OptimConfig
from relax.config.algorithm import AlgorithmConfig
from relax.training.batching import TrainRow
from relax.training.torch_backend import TorchBackend

VOCAB = 16


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        initializer_range=0.1,  # with 0.2 some log-probs are so low that exp() of the KL estimate blows up rounding
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return folder


@pytest.fixture
def make_backend(model_folder: Path) -> Callable[..., TorchBackend]:
    def make(optim: dict[str, Any] | None = None, total_steps: int = 10, **actor: Any) -> TorchBackend:
        config = ActorConfig(optim=OptimConfig(**(optim or {})), **actor)
        return TorchBackend(config, model_folder, total_steps, seed=1, threads=1)

    return make


@pytest.fixture
def make_rows() -> Callable[..., list[TrainRow]]:
    """Rows of random unequal lengths, prompts and temperatures; three members a group."""

    def make(count: int, seed: int = 0, lengths: tuple[int, int] = (5, 10), **fixed: Any) -> list[TrainRow]:
        draw = np.random.default_rng(seed)
        rows = []
        for index in range(count):
            length = int(draw.integers(lengths[0], lengths[1] + 1))
            mask = np.arange(length) >= draw.integers(1, length - 1)
            values: dict[str, Any] = {
                "row_id": f"toy:0:{index // 3}/{index % 3}/0",
                "tokens": draw.integers(0, VOCAB, length).astype(np.int32),
                "loss_mask": mask,
                "rollout_logprobs": np.where(mask, draw.uniform(-4, -1, length), 0).astype(np.float32),
                "versions": np.where(mask, 0, -1).astype(np.int32),
                "temperature": float(draw.uniform(0.6, 1.4)),
                "advantage": float(draw.normal()),
                "ref_logprobs": np.where(mask, draw.uniform(-4, -1, length), 0).astype(np.float32),
            }
            rows.append(TrainRow(**{**values, **fixed}))
        return rows

    return make


ALGORITHMS = {
    "grpo_kl_entropy": AlgorithmConfig(name="grpo", kl={"coef": 0.1}, entropy_coef=0.01),
    "dapo": AlgorithmConfig(name="dapo"),
    "sum_over_constant": AlgorithmConfig(aggregation="seq_sum_constant", aggregation_constant=8),
    "trainer_truncated": AlgorithmConfig(
        name="dapo", behaviour="trainer", correction={"weight": "token", "cap": 2.0, "mask": "geometric"}
    ),
    "gspo": AlgorithmConfig(name="gspo", clip_low=0.5, clip_high=0.5),
    "cispo": AlgorithmConfig(name="cispo"),
    "sapo": AlgorithmConfig(name="sapo"),
    "sft": AlgorithmConfig(name="sft"),
}


@pytest.fixture(params=list(ALGORITHMS))
def algorithm(request: pytest.FixtureRequest) -> AlgorithmConfig:
    return ALGORITHMS[request.param]

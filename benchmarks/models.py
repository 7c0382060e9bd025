"""Models made on the spot for the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def small_qwen3(vocab_size: int = 512, max_positions: int = 1024) -> Any:
    """A random Qwen3 of 10.8M parameters (at a vocabulary of 512): 6 layers of width 384."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=max_positions,
    )
    return Qwen3ForCausalLM(config).eval()


def parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder

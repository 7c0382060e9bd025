"""Models made on the spot for the benchmarks."""

from __future__ import annotations

from typing import Any


def random_qwen3(
    vocab_size: int = 512, hidden_size: int = 384, intermediate_size: int = 1024, layers: int = 6, **more: Any
) -> Any:
    """A Qwen3 with random weights as transformers gives them: by default 10.8M parameters. `more` goes to its
    configuration."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        **more,
    )
    return Qwen3ForCausalLM(config).eval()


def parameters(model: Any) -> int:
    return int(sum(p.numel() for p in model.parameters()))

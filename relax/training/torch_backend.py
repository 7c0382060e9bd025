"""Backend `torch`: any Hugging Face causal language model in one process."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax.config.actor import ActorConfig
from relax.training.base import TrainBatch
from relax.training.scoring import Scorer
from relax.training.torch_trainer import TorchTrainer, saving
from relax.types import Json, ModelError

_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
    "chat_template*", "*.py",
)  # fmt: skip


class TorchBackend(TorchTrainer):
    """`TrainingBackend` over float32 weights; dropout is off, so the same rows give the same log-probs."""

    def __init__(
        self,
        config: ActorConfig,
        model_folder: Path,
        total_steps: int,
        seed: int,
        threads: int,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._config = config
        self._folder = model_folder
        model = load_model(model_folder, trust_remote_code)
        if config.gradient_checkpointing:
            enable_checkpointing(model)
        self._scorer = Scorer(
            model, model_folder, autocast_bf16=config.autocast_bf16, share_prompts=config.share_prompts
        )
        super().__init__(model, self._scorer, config.optim, total_steps)

    def _scored(self, batch: TrainBatch) -> tuple[Tensor, Tensor, TrainBatch]:
        if batch.teacher_topk_ids is None:
            return super()._scored(batch)
        logprobs, entropy, others = self._scorer.of_ids(
            batch.tokens, batch.loss_mask, batch.temperature, batch.teacher_topk_ids
        )
        return logprobs, entropy, replace(batch, topk_logprobs=others)

    @torch.no_grad()
    def logprobs(self, tokens: Tensor, attention_mask: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        if tokens.shape[1] == 1:
            return torch.zeros(tokens.shape), torch.zeros(tokens.shape)
        wanted = attention_mask.to(self.device, torch.bool).clone()
        wanted[:, 0] = False
        return self._score(tokens.to(self.device), wanted, temperature.to(self.device))

    def export(self, folder: Path) -> None:
        with saving(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._model.save_pretrained(folder)  # type: ignore[operator]
            for pattern in _TOKENIZER_FILES:
                for path in self._folder.glob(pattern):
                    shutil.copy2(path, folder / path.name)

    def describe(self) -> Mapping[str, Json]:
        return {
            "backend": "torch",
            "model": type(self._model).__name__,
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "device": str(self.device),
            "autocast_bf16": self._config.autocast_bf16,
            "gradient_checkpointing": self._config.gradient_checkpointing,
            "updates": self._updates,
        }

    def close(self) -> None:
        """Forget model and optimizer; no other call is legal afterwards."""
        self._scorer.close()
        del self._model, self._scorer, self._score, self._optimizer, self._params


def load_model(folder: Path, trust_remote_code: bool) -> Any:
    """Float32, in evaluation mode (no dropout). Raises `ModelError` for a folder without such a model."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: cannot be loaded as a causal language model: {error}") from error
    return model.eval()


def enable_checkpointing(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # Layers recompute only in training mode. Setting it on them alone leaves dropout inside them off.
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True

"""The critic of PPO: a value for each sampled token, from a language model with a scalar head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relax.config.actor import ActorConfig, CriticConfig
from relax.training.scoring import ModelInputs
from relax.training.torch_backend import enable_checkpointing
from relax.training.torch_trainer import TorchTrainer
from relax.types import ModelError


class ValueModel(nn.Module):
    """A Hugging Face model without its output layer, and a linear head that starts at 0: every value is 0 then."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(int(trunk.config.hidden_size), 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: dict[str, Tensor], selected: Tensor) -> Tensor:
        """float32 [N]: values at the flat positions `selected` [N]."""
        hidden = self.trunk(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        values: Tensor = self.head(hidden.index_select(0, selected)).squeeze(-1).float()
        return values


class TorchCritic(TorchTrainer):
    """Trained by `step` with a `ValueLoss`. The value at position t is that of the state before tokens[:, t].

    Raises `ModelError` for a folder without a model.
    """

    output_name = "value"

    def __init__(
        self,
        config: CriticConfig,
        actor: ActorConfig,
        model_folder: Path,
        total_updates: int,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModel

        try:
            trunk = AutoModel.from_pretrained(
                model_folder, dtype=torch.float32, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"{model_folder}: cannot be loaded as the critic: {error}") from error
        trunk.eval()
        if actor.gradient_checkpointing:
            enable_checkpointing(trunk)
        self._autocast_bf16 = actor.autocast_bf16
        self._inputs = ModelInputs(trunk, actor.share_prompts)
        super().__init__(ValueModel(trunk), self._values, config.optim, total_updates)

    @torch.no_grad()
    def values(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """No gradient. float32 [R, T] where `wanted` (bool [R, T], false at position 0), 0 elsewhere."""
        return self._values(tokens.to(self.device), wanted.to(self.device), torch.empty(0))[0]

    def _values(self, tokens: Tensor, wanted: Tensor, _temperature: Tensor) -> tuple[Tensor, Tensor]:
        inputs, selected = self._inputs(tokens, wanted)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self._autocast_bf16):
            values = self._model(inputs, selected)
        empty = torch.zeros(tokens.shape, device=tokens.device)
        return empty.index_put(wanted.nonzero(as_tuple=True), values), empty

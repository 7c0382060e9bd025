"""Backend `torch`: any Hugging Face causal language model in one process."""

from __future__ import annotations

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from relax.config.roles import ActorConfig, OptimConfig
from relax.training.base import LossFn, LossOutput, NonFiniteUpdate, StepResult, TrainBatch
from relax.training.schedule import learning_rate
from relax.training.scoring import Scorer
from relax.types import Json, ModelError

STATE_SCHEMA = 1
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
    "chat_template*", "*.py",
)  # fmt: skip


class TorchBackend:
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
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._config = config
        self._folder = model_folder
        self._total_steps = total_steps
        self._updates = 0
        self._model = load_model(model_folder, trust_remote_code).to(self.device)
        if config.gradient_checkpointing:
            _enable_checkpointing(self._model)
        self._params = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = _adamw(self._params, config.optim)
        self._score = Scorer(
            self._model, model_folder, autocast_bf16=config.autocast_bf16, share_prompts=config.share_prompts
        )

    # ---- log-probs

    @torch.no_grad()
    def logprobs(self, tokens: Tensor, attention_mask: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        if tokens.shape[1] == 1:
            return torch.zeros(tokens.shape), torch.zeros(tokens.shape)
        wanted = attention_mask.to(self.device, torch.bool).clone()
        wanted[:, 0] = False
        return self._score(tokens.to(self.device), wanted, temperature.to(self.device))

    # ---- training

    def step(self, batches: Iterable[TrainBatch], loss_fn: LossFn) -> StepResult:
        """See `TrainingBackend.step`. A non-finite number raises at once; the rest of the stream is not read."""
        totals = _Totals()
        compute_s = 0.0
        try:
            for batch in batches:
                start = time.perf_counter()
                totals.add(batch, self._accumulate(_to(batch, self.device), loss_fn))
                compute_s += time.perf_counter() - start
            start = time.perf_counter()
            if totals.rows == 0:
                raise ValueError("a training step got no batch")
            if totals.normaliser <= 0:
                raise ValueError("a training step got no sampled token")
            grad_norm, lr = self._update(totals.normaliser)
            compute_s += time.perf_counter() - start
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        return StepResult(
            loss=totals.loss_sum / totals.normaliser,
            grad_norm=grad_norm,
            lr=lr,
            n_tokens=totals.tokens,
            n_rows=totals.rows,
            stats=totals.reduced(),
            compute_s=compute_s,
        )

    def _accumulate(self, batch: TrainBatch, loss_fn: LossFn) -> LossOutput:
        logprobs, entropy = self._score(batch.tokens, batch.loss_mask, batch.temperature)
        _require_finite("trainer log-prob", logprobs.detach(), batch)
        _require_finite("rollout log-prob", batch.rollout_logprobs, batch)
        _require_finite("advantage", batch.advantages, batch)
        if batch.ref_logprobs is not None:
            _require_finite("reference log-prob", batch.ref_logprobs, batch)
        output = loss_fn(batch, logprobs, entropy)
        _require_finite("loss", output.loss_sum.detach(), batch)
        output.loss_sum.backward()  # type: ignore[no-untyped-call]
        return output

    def _update(self, normaliser: float) -> tuple[float, float]:
        """Scale the accumulated sums once, clip, and step. Returns (norm before clipping, learning rate)."""
        grads = [p.grad for p in self._params if p.grad is not None]
        norm = float(nn.utils.get_total_norm(grads)) / normaliser
        if not math.isfinite(norm):
            raise NonFiniteUpdate(f"gradient norm is {norm}")
        scale = 1.0 / normaliser
        limit = self._config.optim.clip_grad_norm
        if limit is not None and norm > limit:
            scale *= limit / norm
        for grad in grads:
            grad.mul_(scale)
        lr = learning_rate(self._config.optim, self._updates, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._updates += 1
        return norm, lr

    # ---- state

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self.state_tensors()}, folder / "model.safetensors")
        state = {
            "schema": STATE_SCHEMA,
            "updates": self._updates,
            "moments": self._optimizer.state_dict()["state"],
            "rng": torch.get_rng_state(),
        }
        torch.save(state, folder / "trainer.pt")

    def load(self, folder: Path) -> None:
        """Raises `ModelError` when the folder is not a state of this model; nothing is changed then."""
        state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        if state["schema"] != STATE_SCHEMA:
            raise ModelError(f"{folder}: trainer state of schema {state['schema']}, this build reads {STATE_SCHEMA}")
        saved, own = load_file(folder / "model.safetensors"), dict(self.state_tensors())
        if _shapes(saved) != _shapes(own):
            differing = sorted(dict(_shapes(saved).items() ^ _shapes(own).items()))
            raise ModelError(f"{folder}: tensors differ from the model's: {', '.join(differing[:8])}")
        # Settings come from the configuration, which may have changed since; only the moments are state.
        settings = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state["moments"], "param_groups": settings})
        for name, tensor in own.items():
            tensor.copy_(saved[name])
        self._updates = state["updates"]
        torch.set_rng_state(state["rng"])

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._model.save_pretrained(folder)
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
        self._score.close()
        del self._model, self._score, self._optimizer, self._params


class _Totals:
    """Sums over the micro-batches of one step."""

    def __init__(self) -> None:
        self.loss_sum = 0.0
        self.normaliser = 0.0
        self.tokens = 0
        self.rows = 0
        self._stats: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, batch: TrainBatch, output: LossOutput) -> None:
        self.loss_sum += float(output.loss_sum.detach())
        self.normaliser += output.normaliser
        self.tokens += batch.n_tokens
        self.rows += batch.tokens.shape[0]
        for name, pair in output.stats.items():
            self._stats[name].append(pair)

    def reduced(self) -> dict[str, float]:
        return {name: _reduce(name, pairs) for name, pairs in self._stats.items()}


def _reduce(name: str, pairs: list[tuple[float, float]]) -> float:
    if name.endswith("_max"):
        return max(value for value, _ in pairs)
    if name.endswith("_min"):
        return min(value for value, _ in pairs)
    count = sum(count for _, count in pairs)
    return sum(value for value, _ in pairs) / count if count else 0.0


def _require_finite(what: str, values: Tensor, batch: TrainBatch) -> None:
    if not bool(torch.isfinite(values).all()):
        raise NonFiniteUpdate(f"a {what} is not finite in the batch of rows {', '.join(batch.row_ids[:4])} ...")


def _to(batch: TrainBatch, device: torch.device) -> TrainBatch:
    if batch.tokens.device.type == device.type:
        return batch
    return replace(
        batch,
        tokens=batch.tokens.to(device),
        attention_mask=batch.attention_mask.to(device),
        loss_mask=batch.loss_mask.to(device),
        temperature=batch.temperature.to(device),
        advantages=batch.advantages.to(device),
        rollout_logprobs=batch.rollout_logprobs.to(device),
        versions=batch.versions.to(device),
        ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs.to(device),
    )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _adamw(params: list[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


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


def _enable_checkpointing(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # Layers recompute only in training mode. Setting it on them alone leaves dropout inside them off.
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True

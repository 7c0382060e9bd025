"""One model under one AdamW: accumulate un-normalised sums, scale once, clip, step, save and load."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from relax.config.actor import OptimConfig
from relax.training.base import OPTIONAL_COLUMNS, LossFn, LossOutput, NonFiniteUpdate, NotSaved, StepResult, TrainBatch
from relax.training.schedule import learning_rate
from relax.training.state import TrainerState, check_tensors, read_state, write_state
from relax.types import ModelError

STATE_SCHEMA = 2
RNG, STEPS = "rng", "steps"
"""Of a state: the CPU generator's (uint8), and the updates of each parameter (float32 [parameters])."""
MODEL, MOMENTS = "model.", ("exp_avg", "exp_avg_sq")

Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(tokens, wanted, temperature) -> two float32 [R, T], 0 where not wanted: what the loss function gets."""


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """The writers of safetensors and torch have errors of their own for a disk that is full: `NotSaved` for all."""
    try:
        yield
    except (SafetensorError, RuntimeError, OSError) as error:
        raise NotSaved(f"cannot write {folder}: {error}") from error


class TorchTrainer:
    """What a policy and a critic have in common; a subclass gives the model and how it scores a batch."""

    output_name = "trainer log-prob"

    def __init__(self, model: nn.Module, score: Score, optim: OptimConfig, total_updates: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.to(self.device)
        self._score = score
        self._optim = optim
        self._total_updates = total_updates
        self._updates = 0
        self._params = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = _adamw(self._params, optim)
        for parameter in self._params:  # as the first step would, so that a state has all its tensors from the start
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=self.device),
                **{name: torch.zeros_like(parameter) for name in MOMENTS},
            }

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
        logprobs, entropy, batch = self._scored(batch)
        _require_finite(self.output_name, logprobs.detach(), batch)
        _require_finite("rollout log-prob", batch.rollout_logprobs, batch)
        _require_finite("advantage", batch.advantages, batch)
        for name in OPTIONAL_COLUMNS:
            column = getattr(batch, name)
            if column is not None:
                _require_finite(name, column, batch)
        output = loss_fn(batch, logprobs, entropy)
        _require_finite("loss", output.loss_sum.detach(), batch)
        output.loss_sum.backward()  # type: ignore[no-untyped-call]
        return output

    def _scored(self, batch: TrainBatch) -> tuple[Tensor, Tensor, TrainBatch]:
        """What the loss function gets; the batch may come back with more columns."""
        return *self._score(batch.tokens, batch.loss_mask, batch.temperature), batch

    def _update(self, normaliser: float) -> tuple[float, float]:
        """Scale the accumulated sums once, clip, and step. Returns (norm before clipping, learning rate)."""
        grads = [p.grad for p in self._params if p.grad is not None]
        norm = float(nn.utils.get_total_norm(grads)) / normaliser
        if not math.isfinite(norm):
            raise NonFiniteUpdate(f"gradient norm is {norm}")
        scale = 1.0 / normaliser
        limit = self._optim.clip_grad_norm
        if limit is not None and norm > limit:
            scale *= limit / norm
        for grad in grads:
            grad.mul_(scale)
        lr = learning_rate(self._optim, self._updates, self._total_updates)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._updates += 1
        return norm, lr

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()

    def state(self) -> TrainerState:
        """See `TrainingBackend.state`."""
        tensors = {MODEL + name: tensor for name, tensor in self.state_tensors()}
        steps = []
        for name, parameter in self._model.named_parameters():
            moments = self._optimizer.state.get(parameter)
            if moments is not None:
                tensors |= {f"{kind}.{name}": moments[kind] for kind in MOMENTS}
                steps.append(moments["step"])
        tensors[STEPS] = torch.stack([step.to(torch.float32) for step in steps])
        tensors[RNG] = torch.get_rng_state()
        return TrainerState(tensors, {"schema": STATE_SCHEMA, "updates": self._updates})

    def load_state(self, saved: TrainerState, where: str) -> None:
        """See `TrainingBackend.load_state`."""
        if saved.facts.get("schema") != STATE_SCHEMA:
            schema = saved.facts.get("schema")
            raise ModelError(f"{where}: trainer state of schema {schema}, this build reads {STATE_SCHEMA}")
        own = self.state()
        check_tensors(saved, own, where)
        # Settings come from the configuration, which may have changed since; only the moments are state.
        for name, tensor in own.tensors.items():
            if name not in (STEPS, RNG):
                tensor.copy_(saved.tensors[name])
        held = [moments for p in self._model.parameters() if (moments := self._optimizer.state.get(p)) is not None]
        for moments, step in zip(held, saved.tensors[STEPS], strict=True):
            moments["step"].copy_(step)
        self._updates = saved.facts["updates"]
        torch.set_rng_state(saved.tensors[RNG].cpu())

    def save(self, folder: Path) -> None:
        with saving(folder):
            write_state(self.state(), folder)

    def load(self, folder: Path) -> None:
        """Raises `ModelError` when the folder is not a state of this model; nothing is changed then."""
        self.load_state(read_state(folder), str(folder))


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
    moved: dict[str, Any] = {name: getattr(batch, name).to(device) for name in _COLUMNS}
    for name in OPTIONAL_COLUMNS:
        column = getattr(batch, name)
        moved[name] = None if column is None else column.to(device)
    return replace(batch, **moved)


_COLUMNS = (
    "tokens", "attention_mask", "loss_mask", "temperature", "advantages", "rollout_logprobs", "versions",
)  # fmt: skip


def _adamw(params: list[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

"""The training backend protocol.

A backend owns the model, the optimizer and the gradient scaling. A loss is a function of a batch and
the log-probs that the backend computed; it returns un-normalised sums, so that a step may be streamed
in any micro-batching (B25):  gradient = grad(sum of loss_sum) / (sum of normaliser).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from relax.training.state import TrainerState
from relax.types import NO_VERSION, Json, PolicyVersion, RelaxError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


OPTIONAL_COLUMNS = (
    "ref_logprobs", "proximal_logprobs", "values", "returns", "token_weights", "teacher_logprobs", "teacher_topk_ids",
    "teacher_topk_logprobs",
)  # fmt: skip
"""Of `TrainBatch` and `TrainRow`: there for all rows of a batch or for none."""


class NotSaved(RelaxError):
    """A model or a trainer's state could not be written; says where and why."""


class NonFiniteUpdate(RelaxError):
    """Loss or gradient was not finite; parameters and optimizer state are unchanged (B45)."""


@dataclass(slots=True)
class TrainBatch:
    """One padded micro-batch of whole rows; R rows, T = longest row. All tensors on the backend's device.

    tokens: int64 [R, T], right-padded; attention_mask: bool [R, T]; loss_mask: bool [R, T], true on
    sampled tokens; temperature: float32 [R]; advantages: float32 [R, T], 0 where loss_mask is false;
    rollout_logprobs: float32 [R, T]; versions: int32 [R, T]; version: of the policy that is trained.

    float32 [R, T] or None, where an algorithm reads it: ref_logprobs; proximal_logprobs, the trainer's own before
    the step's first update; values of the critic then, and the returns it learns; token_weights, factors of the
    policy term; teacher_logprobs; teacher_topk_logprobs [R, T, K] of the tokens teacher_topk_ids (int64 [R, T, K]),
    and topk_logprobs, the policy's own of those tokens, with gradient: the backend adds them.

    Every [R, T] array is aligned with `tokens`: position t speaks of tokens[:, t] given tokens[:, :t].
    loss_mask[:, 0] is always false.
    """

    tokens: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    temperature: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    versions: Tensor
    ref_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    token_weights: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_topk_ids: Tensor | None = None
    teacher_topk_logprobs: Tensor | None = None
    topk_logprobs: Tensor | None = None
    version: PolicyVersion = NO_VERSION
    row_ids: tuple[str, ...] = ()
    group_ids: tuple[str, ...] = ()

    @property
    def n_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(slots=True)
class LossOutput:
    """loss_sum: scalar with gradient, un-normalised; normaliser: this batch's share of the divisor
    (tokens, sequences, ...); stats: name -> (sum, count), reduced over the step as sum/count; names
    ending in `_max` or `_min` carry (value, 1) and reduce by max or min. terms: float32 [R, T] without gradient,
    what `loss_sum` is the sum of, where it is one over tokens; a dump records them."""

    loss_sum: Tensor
    normaliser: float
    stats: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    terms: Tensor | None = None


LossFn = Callable[["TrainBatch", "Tensor", "Tensor"], LossOutput]
"""(batch, logprobs [R, T] with gradient, entropy [R, T] with gradient) -> LossOutput."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """After one optimizer update: loss is loss_sum/normaliser over the step."""

    loss: float
    grad_norm: float
    lr: float
    n_tokens: int
    n_rows: int
    stats: Mapping[str, float]
    compute_s: float
    """Seconds inside forward, backward and update, without waiting for batches."""


class TrainingBackend(Protocol):
    """Not thread-safe: one thread calls it."""

    def logprobs(self, tokens: Tensor, attention_mask: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """No gradient. float32 [R, T] each: log-probs of tokens (0 at position 0) at the temperature,
        and entropies of the distribution that drew them (0 at position 0)."""
        ...

    def step(self, batches: Iterable[TrainBatch], loss_fn: LossFn) -> StepResult:
        """Consume the stream, accumulate, scale once, clip, update.

        Raises `NonFiniteUpdate` with nothing changed. An exception of the iterator discards the
        gradients and passes through. Raises `ValueError` on an empty stream."""
        ...

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, live parameter) in a fixed order; tied parameters once."""
        ...

    def state(self) -> TrainerState:
        """Model, optimizer, schedule and RNG: what a restarted trainer needs to go on as if it had not been."""
        ...

    def load_state(self, saved: TrainerState, where: str) -> None:
        """Raises `ModelError`, which says `where`, for the state of another model; nothing is changed then."""
        ...

    def save(self, folder: Path) -> None:
        """The state into an existing empty folder. Raises `NotSaved`."""
        ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """A Hugging Face folder (weights, config, tokenizer) that `AutoModelForCausalLM` loads. Raises `NotSaved`."""
        ...

    def describe(self) -> Mapping[str, Json]: ...

    def close(self) -> None: ...


class Critic(Protocol):
    """The value model of one actor; called by the same thread as the backend."""

    def values(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """No gradient. float32 [R, T]: where `wanted` the value of the state before that token, 0 elsewhere."""
        ...

    def step(self, batches: Iterable[TrainBatch], loss_fn: LossFn) -> StepResult:
        """As `TrainingBackend.step`; the loss function gets (batch, values with gradient, zeros)."""
        ...

    def state(self) -> TrainerState: ...

    def load_state(self, saved: TrainerState, where: str) -> None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

"""The section of the actor."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax.config.algorithm import AlgorithmConfig
from relax.config.base import StrictModel
from relax.config.data import DataConfig
from relax.config.dump import DumpConfig


class OptimConfig(StrictModel):
    """AdamW."""

    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay; not applied to vectors (norms, biases)."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up, to `min_lr_ratio` at the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear warm-up."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final learning rate over the peak."""


class WarmStartConfig(StrictModel):
    """Short supervised training on labelled prompts before version 0 is published."""

    steps: Annotated[int, Field(ge=0)] = 0
    """0 is off."""
    batch: Annotated[int, Field(ge=1)] = 64
    """Prompts per step."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate."""
    data: DataConfig | None = None
    """Labelled prompts; required when steps > 0."""

    @model_validator(mode="after")
    def _data_when_on(self) -> WarmStartConfig:
        if (self.steps > 0) != (self.data is not None):
            raise ValueError("warm_start.data is required with warm_start.steps > 0 and illegal without")
        return self


class CriticConfig(StrictModel):
    """The critic of advantage `gae`, hosted by the actor."""

    path: str | None = None
    """Folder of its starting model; default that of the policy."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """How far a value may move in one step before its error counts unclipped no more; None is off."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps in which the critic alone learns and the policy stands still."""


class ActorConfig(StrictModel):
    """Training."""

    backend: str = "torch"
    """`torch`, `simulated` (takes as long as run.simulation says, and learns nothing), or a class by import path."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Loss, advantages, corrections."""
    trainer: str | None = None
    """An own class in place of the built-in step: `package.module:Class` or `path/to/file.py:Class`."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    critic: CriticConfig | None = None
    """The critic; required by advantage `gae`."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised steps before the first version."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Padded tokens of one forward and backward."""
    share_prompts: bool = True
    """Compute a prompt once for all its samples in a micro-batch. The numbers stay the same up to rounding."""
    groups_per_lease: Annotated[int, Field(ge=1)] | None = None
    """Groups taken from the bus at once; default a quarter of a step."""
    autocast_bf16: bool = False
    """Matrix products in bfloat16 over float32 weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    max_skipped_steps: Annotated[int, Field(ge=0)] = 3
    """Consecutive updates that may be skipped for non-finite numbers before the run stops (B45)."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of published weights; must equal rollout.engine.dtype, or their digests could not agree."""
    export: bool = False
    """Write the trained model as a Hugging Face folder `export` in the run folder at the end."""
    snapshot_every: Annotated[int, Field(ge=0)] = 1
    """Steps between snapshots of the actor's state in host memory, from which one that died goes on. 0: only for
    checkpoints."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0: only the last step."""
    dump: DumpConfig = DumpConfig()
    """Steps that are recorded."""

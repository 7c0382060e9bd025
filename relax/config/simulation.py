"""A cluster as a time model: what engines and trainer of a simulated run take how long for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax.config.base import StrictModel


class LengthConfig(StrictModel):
    """Response lengths: log-normal, cut at `run.max_response_tokens`."""

    mean_tokens: Annotated[float, Field(gt=0)] = 3500.0
    """Mean before the cut."""
    sigma: Annotated[float, Field(ge=0)] = 0.9
    """Standard deviation of the logarithm."""
    prompt_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens of a prompt."""


class EngineModelConfig(StrictModel):
    """One inference engine on one GPU; a decode step draws a token for each running sequence."""

    step_s: Annotated[float, Field(gt=0)] = 5.5e-3
    """Of a decode step with nothing in the cache: weights read once, kernels launched."""
    sequence_s: Annotated[float, Field(ge=0)] = 1.0e-5
    """More for each running sequence."""
    cached_token_s: Annotated[float, Field(ge=0)] = 6.0e-8
    """More for each token in the cache of the running sequences: keys and values are read once a step."""
    prefill_token_s: Annotated[float, Field(ge=0)] = 2.0e-5
    """Of a prompt token."""
    slots: Annotated[int, Field(ge=1)] = 256
    """Sequences decoded at once."""
    swap_s: Annotated[float, Field(ge=0)] = 0.3
    """Stall of an engine that takes new weights."""


class TrainerModelConfig(StrictModel):
    """The trainer, in GPU-seconds over all its GPUs."""

    token_gpu_s: Annotated[float, Field(gt=0)] = 2.0e-4
    """Of a trained token: log-probs, forward, backward."""
    update_s: Annotated[float, Field(ge=0)] = 1.0
    """Of the optimizer step."""
    publish_s: Annotated[float, Field(ge=0)] = 2.0
    """Until a new version can be taken by the engines."""


class SimulationConfig(StrictModel):
    """The cluster of `relax simulate`, and of the engine and training backends named `simulated`."""

    mode: Literal["async", "colocate"] = "async"
    """`async`: engines and trainer have GPUs of their own; `colocate`: all GPUs take turns."""
    gpus: Annotated[int, Field(ge=2)] = 16
    """Of the cluster."""
    rollout_gpus: Annotated[int, Field(ge=1)] = 8
    """Of the engines in mode `async`; the trainer has the others."""
    switch_s: Annotated[float, Field(ge=0)] = 10.0
    """Per step in mode `colocate`: engines sleep and wake, the trainer loads and unloads."""
    lengths: LengthConfig = LengthConfig()
    """Response lengths."""
    engine: EngineModelConfig = EngineModelConfig()
    """Time model of an engine."""
    trainer: TrainerModelConfig = TrainerModelConfig()
    """Time model of the trainer."""
    time_scale: Annotated[float, Field(gt=0)] = 1.0
    """Simulated seconds in one second of a run with the backends `simulated`."""
    failure_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the requests that fail in a simulated engine on their way; not read by `relax simulate`."""
    warm_steps: Annotated[int, Field(ge=0)] = 3
    """First steps left out of the figures."""
    published_s: dict[str, float] = Field(default_factory=dict)
    """Published seconds a step to print beside: `colocate`, `staleness_0`, `staleness_1` ..."""

    @model_validator(mode="after")
    def _gpus(self) -> SimulationConfig:
        if self.rollout_gpus >= self.gpus:
            raise ValueError("simulation.rollout_gpus must leave GPUs for the trainer")
        return self

"""An algorithm as data: advantage, loss, corrections, aggregation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relax.config.base import StrictModel

_PRESETS: dict[str, dict[str, Any]] = {
    # GRPO: DeepSeekMath, arXiv 2402.03300, eq. 3.
    "grpo": {"advantage": "group_mean_std", "aggregation": "seq_mean", "clip_low": 0.2, "clip_high": 0.2},
    # DAPO: arXiv 2503.14476, eq. 8 (clip-higher, token-level loss, no KL).
    "dapo": {"advantage": "group_mean_std", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.28},
}


class KlConfig(StrictModel):
    """KL to the reference policy."""

    coef: Annotated[float, Field(ge=0)] = 0.0
    """Factor; 0 is off."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman, joschu.net/blog/kl-approx.html: -log r, (log r)^2 / 2, r - 1 - log r; r = ref / policy."""
    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or subtracted from the reward before advantages."""


class TisConfig(StrictModel):
    """Truncated importance sampling against the behaviour policy: min(p_trainer / p_rollout, cap)."""

    cap: Annotated[float, Field(gt=0)] | None = None
    """Upper bound of the weight; None is off."""


class AlgorithmConfig(StrictModel):
    """Fields left out come from the preset `name`."""

    name: Literal["grpo", "dapo"] = "grpo"
    """Preset."""
    advantage: Literal["group_mean_std", "group_mean"] = "group_mean_std"
    """(r - mean) / (std + 1e-6) within the group, or r - mean."""
    aggregation: Literal["token_mean", "seq_mean", "seq_sum_constant"] = "seq_mean"
    """Mean over the step's tokens; mean over sequences of token means; sum over tokens / (sequences x constant)."""
    aggregation_constant: Annotated[float, Field(gt=0)] | None = None
    """Divisor of `seq_sum_constant`."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Lower clip of the probability ratio, 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Upper clip of the probability ratio, 1 + clip_high."""
    kl: KlConfig = KlConfig()
    """Reference KL."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus."""
    tis: TisConfig = TisConfig()
    """Correction for the gap between trainer and rollout policy."""
    behaviour: Literal["rollout", "trainer"] = "rollout"
    """Denominator of the ratio: the engine's log-probs, or the trainer's own before the update (then tis applies)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {**_PRESETS.get(data.get("name", "grpo"), {}), **data}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        if (self.aggregation == "seq_sum_constant") != (self.aggregation_constant is not None):
            raise ValueError("aggregation_constant goes with aggregation 'seq_sum_constant', and only with it")
        if self.tis.cap is not None and self.behaviour != "trainer":
            raise ValueError("tis.cap needs behaviour 'trainer': with 'rollout' the ratio already is the correction")
        return self

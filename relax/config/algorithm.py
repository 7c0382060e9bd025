"""An algorithm as data: objective, advantage, surrogate, corrections, aggregation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relax.config.base import StrictModel

Level = Literal["token", "sequence", "geometric"]
AlgorithmName = Literal[
    "grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo", "sapo", "m2po",
    "pg", "ppo", "opd", "sft", "dpo",
]  # fmt: skip

_GROUP = {"advantage": "group_mean_std"}
_PRESETS: dict[AlgorithmName, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300, eq. 3.
    "grpo": {**_GROUP, "aggregation": "seq_mean"},
    # arXiv 2503.14476, eq. 8 (clip-higher, token-level loss, no KL).
    "dapo": {**_GROUP, "aggregation": "token_mean", "clip_high": 0.28},
    # arXiv 2503.20783, section 3.2 and appendix A: no division by the std, none by the length.
    "dr_grpo": {"advantage": "group_mean", "aggregation": "seq_sum_constant"},
    # arXiv 2402.14740: REINFORCE with the leave-one-out baseline of Kool et al. 2019.
    "rloo": {
        "advantage": "leave_one_out",
        "surrogate": "reinforce",
        "aggregation": "seq_sum_constant",
        "aggregation_constant": 1.0,
    },
    # arXiv 2501.03262, section 3: token returns with the KL as a penalty, whitened over the global batch.
    "reinforce_pp": {
        "advantage": "return_to_go",
        "whiten": True,
        "aggregation": "token_mean",
        "kl": {"estimator": "k1", "place": "reward"},
    },
    # arXiv 2501.03262, section 3: group mean as baseline, then whitened over the global batch; k2 in the loss.
    "reinforce_pp_baseline": {
        "advantage": "group_mean",
        "whiten": True,
        "aggregation": "token_mean",
        "kl": {"estimator": "k2"},
    },
    # arXiv 2507.18071, eq. 5 and 7, with the bounds of its section 5.1.
    "gspo": {**_GROUP, "aggregation": "seq_mean", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax-M1, arXiv 2506.13585, eq. 4 and 5: no lower bound, a wide upper one.
    "cispo": {**_GROUP, "aggregation": "token_mean", "surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    # arXiv 2511.20347, eq. 5 and 6.
    "sapo": {**_GROUP, "aggregation": "seq_mean", "surrogate": "sapo"},
    # arXiv 2510.01161, section 4.
    "m2po": {**_GROUP, "aggregation": "token_mean", "surrogate": "ratio", "m2_threshold": 0.04},
    # Williams 1992, without a baseline.
    "pg": {"advantage": "reward", "surrogate": "reinforce", "aggregation": "token_mean"},
    # arXiv 1707.06347, eq. 7, with GAE (arXiv 1506.02438, eq. 16) from a critic.
    "ppo": {"advantage": "gae", "whiten": True, "aggregation": "token_mean"},
    # On-policy distillation: Agarwal et al., arXiv 2306.13649; Gu et al., arXiv 2306.08543.
    "opd": {"advantage": "none", "aggregation": "token_mean", "distill": {"coef": 1.0}},
    "sft": {"objective": "sft", "aggregation": "token_mean"},
    # arXiv 2305.18290, eq. 7.
    "dpo": {"objective": "dpo"},
}


class KlConfig(StrictModel):
    """KL to the reference policy."""

    coef: Annotated[float, Field(ge=0)] = 0.0
    """Factor; 0 is off."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman, joschu.net/blog/kl-approx.html: -log r, (log r)^2 / 2, r - 1 - log r; r = ref / policy."""
    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or subtracted from the reward before advantages."""


class CorrectionConfig(StrictModel):
    """Corrects for data that another policy drew: rho = p_proximal / p_rollout, per token or per sequence.

    A level says what rho is: of the `token`; the product over the row (`sequence`); its geometric mean
    (`geometric`). Rejected tokens weigh 0 and stay in the divisor.
    """

    weight: Literal["none", "token", "sequence", "geometric"] = "none"
    """Multiply the policy term by rho of this level (needs behaviour `trainer`)."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """Truncate the weight: min(rho, cap)."""
    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """Reject tokens whose rho of this level lies outside [mask_low, mask_high]."""
    mask_low: Annotated[float, Field(ge=0)] = 0.5
    """Lower bound of an accepted rho."""
    mask_high: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of an accepted rho."""
    max_lag: Annotated[int, Field(ge=0)] | None = None
    """Reject tokens drawn more than this many versions before the trained one; None keeps all."""

    @model_validator(mode="after")
    def _consistent(self) -> CorrectionConfig:
        if self.cap is not None and self.weight == "none":
            raise ValueError("correction.cap truncates a weight: set correction.weight too")
        if self.mask_low >= self.mask_high:
            raise ValueError("correction.mask_low must be below correction.mask_high")
        return self


class GaeConfig(StrictModel):
    """Returns and generalised advantage estimation (arXiv 1506.02438, eq. 16)."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount per token; also of `return_to_go`."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Weight of longer returns."""


class SapoConfig(StrictModel):
    """Temperatures of the soft gate (arXiv 2511.20347)."""

    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """For tokens with a positive advantage."""
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """For the others."""


class DistillConfig(StrictModel):
    """Pull towards a teacher on the student's own samples."""

    coef: Annotated[float, Field(ge=0)] = 0.0
    """Factor; 0 is off."""
    form: Literal["sampled", "topk_reverse", "topk_forward"] = "sampled"
    """`sampled`: log p_teacher - log p_rollout of each drawn token, added to its advantage (reverse KL by policy
    gradient). `topk_*`: KL(student || teacher) or KL(teacher || student) over the teacher's run.teacher_top_k most
    likely tokens and the rest as one, added to the loss."""


class DpoConfig(StrictModel):
    """Direct preference optimisation."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the pull to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of swapped preferences (conservative DPO)."""


class AlgorithmConfig(StrictModel):
    """Fields left out come from the preset `name`."""

    name: AlgorithmName = "grpo"
    """Preset."""
    objective: str = "policy"
    """`policy`, `sft`, `dpo`, or an own loss: `module:function` or `file.py:function` (`relax.algorithms`)."""
    advantage: str = "group_mean_std"
    """group_mean_std, group_mean, leave_one_out, reward, return_to_go, gae, none, or an own function by path."""
    whiten: bool = False
    """Shift and scale the step's advantages to mean 0 and variance 1 over its sampled tokens."""
    gae: GaeConfig = GaeConfig()
    """Discounting of `gae` and `return_to_go`."""
    surrogate: Literal["clip", "cispo", "sapo", "ratio", "reinforce"] = "clip"
    """Policy term: clipped ratio; log-prob weighted by the clipped ratio; soft gate; plain ratio; log-prob."""
    ratio: Literal["token", "sequence"] = "token"
    """Per token, or the geometric mean over the row's sampled tokens (GSPO)."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Lower clip of the probability ratio, 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Upper clip of the probability ratio, 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss where the advantage is negative (arXiv 1912.09729, eq. 5); None is off."""
    sapo: SapoConfig = SapoConfig()
    """Soft gate of surrogate `sapo`."""
    m2_threshold: Annotated[float, Field(gt=0)] | None = None
    """Mask the step's most off-policy tokens until the mean squared log ratio is below (M2PO); None is off."""
    behaviour: Literal["rollout", "trainer"] = "rollout"
    """Denominator of the ratio: the engine's log-probs, or the trainer's own before the step's first update."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance weights and rejection against the rollout policy."""
    aggregation: Literal["token_mean", "seq_mean", "seq_sum_constant"] = "seq_mean"
    """Mean over the step's tokens; mean over sequences of token means; sum over tokens / (sequences x constant)."""
    aggregation_constant: Annotated[float, Field(gt=0)] | None = None
    """Divisor of `seq_sum_constant`; default run.max_response_tokens."""
    kl: KlConfig = KlConfig()
    """Reference KL."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus."""
    distill: DistillConfig = DistillConfig()
    """Distillation from the teachers of the Ref role."""
    dpo: DpoConfig = DpoConfig()
    """Objective `dpo`."""
    mini_batches: Annotated[int, Field(ge=1)] = 1
    """Optimizer updates per pass over a step: its groups are divided into this many parts."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the groups of a step."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        filled = {**_PRESETS.get(data.get("name", "grpo"), {})}
        for key, value in data.items():
            preset = filled.get(key)
            filled[key] = {**preset, **value} if isinstance(preset, dict) and isinstance(value, dict) else value
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        if self.aggregation_constant is not None and self.aggregation != "seq_sum_constant":
            raise ValueError("aggregation_constant goes with aggregation 'seq_sum_constant', and only with it")
        if self.correction.weight != "none" and self.behaviour != "trainer":
            raise ValueError(
                "correction.weight needs behaviour 'trainer': with 'rollout' the ratio already is the correction"
            )
        if ":" not in self.objective and self.objective not in ("policy", "sft", "dpo"):
            raise ValueError(
                f"unknown objective '{self.objective}': policy, sft, dpo, or an own one as file.py:function"
            )
        if ":" not in self.advantage and self.advantage not in BUILT_IN_ADVANTAGES:
            raise ValueError(
                f"unknown advantage '{self.advantage}': {', '.join(BUILT_IN_ADVANTAGES)}, or an own one as "
                "file.py:function"
            )
        if self.m2_threshold is not None and self.behaviour != "rollout":
            raise ValueError("m2_threshold bounds the ratio to the rollout policy: it needs behaviour 'rollout'")
        if self.objective != "policy" and (self.kl.coef > 0 or self.entropy_coef != 0 or self.distill.coef > 0):
            raise ValueError(
                f"kl.coef, distill.coef and entropy_coef belong to objective 'policy', not to '{self.objective}'"
            )
        return self

    @property
    def updates_per_step(self) -> int:
        return self.mini_batches * self.epochs


BUILT_IN_ADVANTAGES = ("group_mean_std", "group_mean", "leave_one_out", "reward", "return_to_go", "gae", "none")

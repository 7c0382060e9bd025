"""The own section of each role; the actor's is in `relax.config.actor`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relax.config.base import StrictModel
from relax.config.data import DataConfig
from relax.config.recovery import RecoveryConfig
from relax.types import SamplingParams


class SamplingConfig(StrictModel):
    """How samples are drawn."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass. Training needs 1.0: the trainer computes untruncated log-probs."""
    top_k: int = -1
    """-1 is off. Training needs -1."""
    stop: tuple[str, ...] = ()
    """Stop strings."""

    def to_params(self, max_new_tokens: int, seed: int | None = None) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_p, self.top_k, max_new_tokens, self.stop, seed=seed)


class EngineConfig(StrictModel):
    """The inference backend of each rollout instance."""

    backend: str = "embedded"
    """`embedded`, or `simulated`: takes as long as run.simulation says, and draws meaningless tokens."""
    slots: Annotated[int, Field(ge=1)] = 64
    """Sequences decoded at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and arithmetic of the engine."""
    swap: Literal["in_place", "retract"] = "in_place"
    """New weights under running requests: keep their keys and values, or compute them anew (exact log-probs, at the
    cost of a prefill of everything that runs)."""


class FilterConfig(StrictModel):
    """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): which complete groups are worth training."""

    kind: str = "none"
    """`accuracy_band` keeps groups whose mean raw accuracy lies strictly between low and high; or an own function by
    path: the members that have rows -> whether the group is trained."""
    low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Groups at or below are filtered."""
    high: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Groups at or above are filtered."""
    max_filtered_prompts: Annotated[int, Field(ge=1)] = 2000
    """Stop with an error when this many groups in a row are filtered: the task gives no signal (B28)."""
    retire_easy: bool = False
    """Do not draw a prompt again in later epochs that was at or above `high` in an earlier one."""

    @model_validator(mode="after")
    def _known_kind(self) -> FilterConfig:
        if ":" not in self.kind and self.kind not in ("none", "accuracy_band"):
            raise ValueError(f"unknown filter '{self.kind}': none, accuracy_band, or an own one as file.py:function")
        if self.retire_easy and self.kind != "accuracy_band":
            raise ValueError("rollout.filter.retire_easy goes with rollout.filter.kind: accuracy_band")
        return self


class EvalConfig(StrictModel):
    """A fixed held-out set answered through the engines before and after training, and during it."""

    prompts: Annotated[int, Field(ge=0)] = 0
    """How many; 0 is off."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations during training, on instances of their own; 0: only before and after."""
    instances: Annotated[int, Field(ge=0)] = 0
    """Rollout instances that only evaluate. For each evaluation they hold one version, while training goes on."""
    samples: Annotated[int, Field(ge=1)] = 1
    """Answers per prompt; with more than one pass@k is reported for k = 1, 2, 4 ... up to this."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy; several answers need more."""
    seed: int = 10_007
    """Seed of the held-out set of a generated source; must differ from run.seed."""
    data: DataConfig | None = None
    """The held-out set; None: the held-out part of a toy, reasoning-gym or own source."""
    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time for one evaluation."""

    @model_validator(mode="after")
    def _consistent(self) -> EvalConfig:
        if (self.every > 0) != (self.instances > 0):
            raise ValueError(
                "eval.every and eval.instances go together: to evaluate during training takes its own instances"
            )
        if self.every and not self.prompts:
            raise ValueError("eval.every needs eval.prompts")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("eval.samples > 1 needs eval.temperature > 0: greedy answers are all the same")
        return self


class RolloutConfig(StrictModel):
    """Generation: prompts, workers, engines."""

    instances: Annotated[int, Field(ge=1)] = 2
    """Rollout instances, each an own Serve application."""
    instance_num_cpus: Annotated[float, Field(gt=0)] = 0.1
    """Ray CPUs of one instance."""
    instance_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Custom Ray resources of one instance: they place it on the nodes that offer them."""
    data: DataConfig
    """The prompt source."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training rollouts."""
    engine: EngineConfig = EngineConfig()
    """The engine in each instance."""
    worker: str = "single_turn"
    """`single_turn`, or an own class: `package.module:Class` or `path/to/file.py:Class`."""
    teachers: TeacherRouting | None = None
    """Which teacher scores which samples; required with ref.teachers."""
    filter: FilterConfig = FilterConfig()
    """Which complete groups are trained."""
    min_group_size: Annotated[int, Field(ge=1)] | None = None
    """Train a group with failed members if at least this many survive; default all of them."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    start_deadline_s: Annotated[float, Field(gt=0)] = 180.0
    """An instance that is not active this long after its creation has failed."""
    adoption_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Deadline of one weight adoption by an instance, its transfer included."""
    max_segments: Annotated[int, Field(ge=1)] = 1
    """Rows that one sample may take: an own worker's trajectory can be split into several (B22)."""
    sample_retries: Annotated[int, Field(ge=0)] = 2
    """Attempts after a failed worker step before the sample becomes a tombstone (B39)."""


class RewardPart(StrictModel):
    """One term of a weighted reward."""

    name: str
    """exact, overlap, math, format, or an own function: `module:function` or `file.py:function`."""
    weight: float = 1.0
    """Factor in the sum."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""


class OverlongConfig(StrictModel):
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13)."""

    buffer_tokens: Annotated[int, Field(ge=1)]
    """The penalty grows linearly over the last `buffer_tokens` before run.max_response_tokens."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """Penalty at the maximum."""


class RewardConfig(StrictModel):
    """Scoring."""

    parts: Annotated[tuple[RewardPart, ...], Field(min_length=1)]
    """The reward is the weighted sum; the first part's value is the raw accuracy that filters read."""
    rows_per_lease: Annotated[int, Field(ge=1)] = 256
    """Rows taken from the bus at once: what is ready, up to this."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Killable worker processes."""
    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Wall time of one call; its process is killed beyond it."""
    memory_mb: Annotated[int, Field(ge=64)] = 1024
    """Address space that one worker may add to its own at start."""
    on_failure: Literal["exclude", "floor"] = "exclude"
    """`exclude`: the sample becomes a tombstone of its group; `floor`: it gets `failure_reward`, counted."""
    failure_reward: float = 0.0
    """Reward of a failed call under `floor`."""
    max_failure_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The run stops when more of the last 100 calls failed."""
    overlong: OverlongConfig | None = None
    """Length penalty added to the reward."""


class TeacherConfig(StrictModel):
    """A model that the policy is distilled from; its tokenizer must be the policy's."""

    path: str
    """Folder of the teacher."""
    num_cpus: Annotated[float, Field(gt=0)] = 0.1
    """Ray CPUs of its process."""


class TeacherRouting(StrictModel):
    """Which teacher scores a sample."""

    by: str = "source"
    """`source`: the name of its data source; otherwise a key of the prompt's metadata."""
    routes: dict[str, str] = Field(default_factory=dict)
    """Value -> teacher."""
    default: str | None = None
    """Teacher of what no route names; None: such a prompt is an error."""


class RefConfig(StrictModel):
    """Reference and teacher log-probs."""

    reference: bool = True
    """Score samples by the reference policy; off where there are teachers alone."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Teachers by name, each a process of its own."""
    path: str | None = None
    """Folder of another reference model; default is policy version 0."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 4096
    """Padded tokens of one forward."""
    share_prompts: bool = True
    """Compute a prompt once for all its samples in a micro-batch. The numbers stay the same up to rounding."""
    rows_per_lease: Annotated[int, Field(ge=1)] = 64
    """Rows taken from the bus at once: what is ready, up to this."""


class DcsConfig(StrictModel):
    """Weights and checkpoints."""

    shm_dir: str = "/dev/shm"
    """Memory-backed folder of published weights."""
    keep_versions: Annotated[int, Field(ge=1)] = 2
    """Published versions kept when nobody reads them."""
    bucket_bytes: Annotated[int, Field(ge=1 << 12)] = 1 << 28
    """Size of one weight bucket."""
    transport: Literal["auto", "shared_memory", "tcp"] = "auto"
    """How instances get weights. `auto`: from shared memory on the actor's node, over TCP on others. Else always so."""
    host: str = "127.0.0.1"
    """Interface that weights are served on. On several nodes: one of the actor's node that the others reach."""
    transfer_deadline_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest transfer of one version over TCP; the version is kept so long."""
    keep_checkpoints: RetentionConfig = Field(default_factory=lambda: RetentionConfig())
    """Which checkpoints stay on disk after a save; the newest complete one always does, and one that is being read."""
    reserve_bytes: Annotated[int, Field(ge=0)] = 1 << 28
    """Free space that a save must leave on its disk (B47)."""


class RetentionConfig(StrictModel):
    """A checkpoint stays while one of these asks for it."""

    newest: Annotated[int, Field(ge=1)] = 2
    """As many of the newest."""
    best: Annotated[int, Field(ge=0)] = 0
    """As many of those whose step was best by `best_by`; 0 is off."""
    best_by: str = "reward_mean"
    """Metric of the actor's record of the step, e.g. reward_mean, accuracy_mean or loss."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which values of it are better."""
    every: Annotated[int, Field(ge=0)] = 0
    """Those of steps that are a multiple of this stay for good; 0 is off."""


class ControllerConfig(StrictModel):
    """Health, state, control API."""

    heartbeat_s: Annotated[float, Field(gt=0)] = 1.0
    """Interval of the replicas' own reports."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Silence after which a role is shown as lost."""
    start_deadline_s: Annotated[float, Field(gt=0)] = 240.0
    """All roles must have reported within this time."""
    stop_deadline_s: Annotated[float, Field(gt=0)] = 20.0
    """How long the end of a run waits for the actor's last checkpoint, and for all roles to hear of it, before
    everything is taken down."""
    stall_s: Annotated[float, Field(gt=0)] = 120.0
    """When no counter moves for this long, the watchdog names who waits for whom (B46)."""
    bus_silence_s: Annotated[float, Field(gt=0)] = 30.0
    """A bus that answers nothing for this long is taken for dead and made anew."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Detection of faults, and what is done about them how often."""
    stall_stops_run: bool = False
    """Fail the run on a stall instead of only reporting it."""
    logprob_gap_limit: Annotated[float, Field(gt=0)] | None = None
    """Stop when |trainer - engine| log-prob on the probe at equal version exceeds this (B8). None: only report."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where the steps' records go beside metrics.jsonl and Prometheus; needs the extra `trackers`."""
    wandb: WandbConfig = Field(default_factory=lambda: WandbConfig())
    """Used with the tracker `wandb`."""
    expect: ExpectConfig = Field(default_factory=lambda: ExpectConfig())
    """What the finished run must show; the exit code of `relax run` tells."""


class WandbConfig(StrictModel):
    """Weights & Biases."""

    mode: Literal["offline", "online"] = "offline"
    """`offline` writes below the run folder and needs no network: `wandb sync` sends it later."""
    project: Annotated[str, Field(min_length=1)] = "relax"
    """W&B project of the run."""


class ExpectConfig(StrictModel):
    """Acceptance of a finished run; each unset bound is not checked."""

    reward_first_max: float | None = None
    """Mean reward of the first step at most."""
    reward_last_min: float | None = None
    """Mean reward over the last steps at least."""
    accuracy_last_min: float | None = None
    """Mean raw accuracy over the last steps at least."""
    eval_gain_lower95_min: float | None = None
    """Lower 95 % bound of the gain in held-out accuracy at least."""
    logprob_gap_max: float | None = None
    """Largest probe gap at most (float32 stays below 1e-4)."""
    logprob_gap_mean: float | None = None
    """Mean probe gap of any adoption at most (bfloat16 has about 0.02)."""
    last_min: dict[str, float] = Field(default_factory=dict)
    """Metric of the step's record -> its mean over the last steps at least."""
    last_max: dict[str, float] = Field(default_factory=dict)
    """Metric of the step's record -> its mean over the last steps at most."""


RolloutConfig.model_rebuild()
DcsConfig.model_rebuild()
ControllerConfig.model_rebuild()

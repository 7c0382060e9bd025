"""The own section of each role."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relax.config.algorithm import AlgorithmConfig
from relax.config.base import StrictModel
from relax.config.dump import DumpConfig
from relax.types import SamplingParams


class DifficultyConfig(StrictModel):
    """Which rows of a file are asked, and in which order, by a measured share of right answers."""

    key: str = "pass_rate"
    """Number in the row's metadata: the share of right answers, in [0, 1]."""
    low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Rows below are left out (too hard)."""
    high: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Rows above are left out (too easy)."""
    order: Literal["none", "easy_first", "hard_first"] = "none"
    """Curriculum: the order within each epoch; rows of one difficulty are shuffled as data.shuffle says."""

    @model_validator(mode="after")
    def _band(self) -> DifficultyConfig:
        if self.low > self.high:
            raise ValueError("data.difficulty.low must not be above data.difficulty.high")
        return self


FILE_KINDS = ("jsonl", "parquet", "dataset")


class DataConfig(StrictModel):
    """Where prompts come from."""

    kind: Literal["toy", "jsonl", "parquet", "dataset", "reasoning_gym", "own", "mix"] = "toy"
    """`toy`: built-in task; `jsonl`, `parquet`: a file; `dataset`: a folder that Hugging Face `datasets` saved;
    `reasoning_gym`: a task of that package by name; `own`: a class by path; `mix`: several of these."""
    name: str | None = None
    """Name of the source, in group ids and for routing; default that of the task or file."""
    task: str | None = None
    """Toy task (reverse, copy, sort) or reasoning-gym task name."""
    path: str | None = None
    """File or folder of records with `prompt` (text) or `messages`, optional `label`, `metadata`, `response`, `chosen`
    and `rejected`; for `own` the class, as `package.module:Class` or `path/to/file.py:Class`."""
    split: str | None = None
    """Split of a `dataset` folder that holds several."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Key of a record -> column or key of the file that holds it, e.g. {prompt: question, label: answer}."""
    size: Annotated[int, Field(ge=1)] = 4096
    """Prompts in one epoch of a generated source."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the task or own class, e.g. {length: 3} for toys, the dataset's settings for reasoning-gym."""
    sources: tuple[MixPart, ...] = ()
    """Parts of a `mix`."""
    difficulty: DifficultyConfig | None = None
    """Filter and curriculum by difficulty, of files and own classes."""
    system_prompt: str | None = None
    """Put before the user's message in chat prompts."""
    shuffle: bool = True
    """Shuffle each epoch by (seed, epoch)."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the data; the run ends when they are used up. None: as many as the steps need."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """A broken or over-long row stops the start with file and line, or is skipped and counted."""

    @model_validator(mode="after")
    def _fields_go_with_kind(self) -> DataConfig:
        for field, kinds in (
            ("path", (*FILE_KINDS, "own")),
            ("task", ("toy", "reasoning_gym")),
            ("sources", ("mix",)),
        ):
            given = bool(getattr(self, field))
            if given != (self.kind in kinds):
                allowed = " and ".join(f"'{kind}'" for kind in kinds)
                raise ValueError(f"data.{field} is required with data.kind {allowed} and illegal with the others")
        if self.split is not None and self.kind != "dataset":
            raise ValueError("data.split goes with data.kind 'dataset'")
        if self.columns and self.kind not in FILE_KINDS:
            raise ValueError("data.columns goes with data.kind 'jsonl', 'parquet' and 'dataset'")
        if self.difficulty is not None and self.kind not in (*FILE_KINDS, "own"):
            raise ValueError("data.difficulty goes with files and own classes: give it to the part of a mix it means")
        return self


class MixPart(StrictModel):
    """One source of a mix."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the prompts, over the sum of all weights."""
    data: DataConfig
    """The source."""


DataConfig.model_rebuild()


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
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0: only the last step."""
    dump: DumpConfig = DumpConfig()
    """Steps that are recorded."""


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
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept on disk."""
    reserve_bytes: Annotated[int, Field(ge=0)] = 1 << 28
    """Free space that a save must leave on its disk (B47)."""


class ControllerConfig(StrictModel):
    """Health, state, control API."""

    heartbeat_s: Annotated[float, Field(gt=0)] = 1.0
    """Interval of the replicas' own reports."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Silence after which a role is shown as lost."""
    start_deadline_s: Annotated[float, Field(gt=0)] = 240.0
    """All roles must have reported within this time."""
    stall_s: Annotated[float, Field(gt=0)] = 120.0
    """When no counter moves for this long, the watchdog names who waits for whom (B46)."""
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


ControllerConfig.model_rebuild()

"""The facts that all roles of one run share: the `run` mapping of a Serve YAML."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax.config.base import StrictModel
from relax.config.faults import FaultPoint
from relax.config.simulation import SimulationConfig


class Overdue(enum.StrEnum):
    """What happens at step v to a group admitted at v - max_staleness that is not complete."""

    WAIT = "wait"
    TRAIN = "train"
    DROP = "drop"


class Fault(enum.StrEnum):
    """Faults that a test can put into a run, to see the safeguards fail."""

    SKIP_ADOPTION = "skip_adoption"
    """Engines claim a new version and its digest without loading the tensors."""
    CORRUPT_BUCKET = "corrupt_bucket"
    """One byte of every published weight bucket is flipped after its digest was taken."""
    DROP_TENSOR = "drop_tensor"
    """One tensor of every published version is left out of its bucket."""


class ModelConfig(StrictModel):
    """Which policy is trained."""

    kind: Literal["tiny_char", "hf"] = "tiny_char"
    """`tiny_char`: a small random Qwen3 over characters, made on the spot. `hf`: a Hugging Face folder."""
    path: str | None = None
    """Folder of the model and its tokenizer (kind `hf`)."""
    alphabet: str = "0123456789>"
    """Characters that the tokenizer of `tiny_char` knows."""
    hidden_size: Annotated[int, Field(ge=8)] = 64
    """Width of `tiny_char`; a multiple of `heads`."""
    layers: Annotated[int, Field(ge=1)] = 2
    """Layers of `tiny_char`."""
    heads: Annotated[int, Field(ge=1)] = 4
    """Attention heads of `tiny_char`."""
    trust_remote_code: bool = False
    """Let a model folder bring its own Python code."""

    @model_validator(mode="after")
    def _path_goes_with_hf(self) -> ModelConfig:
        if (self.kind == "hf") != (self.path is not None):
            raise ValueError("model.path is required with model.kind 'hf' and illegal with 'tiny_char'")
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"model.hidden_size {self.hidden_size} must be a multiple of 2 x heads ({2 * self.heads})")
        return self


class BusConfig(StrictModel):
    """Limits and deadlines of the field store."""

    max_rows: Annotated[int, Field(ge=16)] = 8192
    """Rows held at once, all queues together; producers wait beyond it."""
    max_bytes: Annotated[int, Field(ge=1 << 16)] = 1 << 30
    """Bytes held at once (worst case of reserved groups included); producers wait beyond it."""
    partition_rows: Annotated[int, Field(ge=16, le=10_000)] = 8192
    """Rows after which a queue moves on to a new TransferQueue partition (a poll costs 2 ms at 10k rows)."""
    lease_ttl_s: Annotated[float, Field(gt=0)] = 30.0
    """A lease that is neither extended nor acknowledged for this long is redelivered."""
    max_deliveries: Annotated[int, Field(ge=1)] = 5
    """Deliveries after which a row goes to the dead letters, counted."""
    rpc_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Deadline of one call to the bus."""
    storage_units: Annotated[int, Field(ge=1)] = 1
    """TransferQueue storage processes."""
    host: str = "127.0.0.1"
    """Interface that the bus listens on. Its wire is unauthenticated: loopback on one node, a private network else."""


class RunConfig(StrictModel):
    """Shared by every role; a change here restarts all of them."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")] = "run"
    """Names the run in actor names, metrics and logs."""
    run_dir: str = "runs/run"
    """Folder of config, metrics, samples, checkpoints, report. Relative to RELAX_HOME, else to the start folder."""
    seed: int = 1
    """Seeds weights, data order and sampling."""
    steps: Annotated[int, Field(ge=1)] = 100
    """Training steps; each trains `groups_per_step` groups."""
    groups_per_step: Annotated[int, Field(ge=1)] = 16
    """Prompt groups per training step (B)."""
    group_size: Annotated[int, Field(ge=1)] = 16
    """Samples per prompt (n)."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Steps that the policy of a sample may lag behind the trainer (S). 0 is exactly on-policy."""
    deterministic: bool = False
    """Results equal to the last bit on one machine, with or without crashes. Slower: needs `max_staleness` 0,
    `rollout.instances` 1 and `rollout.engine.slots` 1, and the trainer waits for all rows of a step."""
    overdue: Overdue | None = None
    """Policy for groups late by `max_staleness`. Default: `wait` at max_staleness 0, else `train`."""
    max_token_lag: Annotated[int, Field(ge=0)] | None = None
    """Largest lag of a token that is still trained under `overdue: train`. Default 2 x max_staleness + 2."""
    group_deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """A group not complete this long after admission is dropped, with that reason."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 32
    """Longer prompts are refused (or skipped, see rollout.data.on_bad_row)."""
    max_response_tokens: Annotated[int, Field(ge=1)] = 16
    """Generation stops here with finish_reason `length`."""
    responses: Literal["generated", "recorded"] = "generated"
    """`generated`: engines draw samples and the reward scores them. `recorded`: the data holds them (SFT, DPO)."""
    use_ref: bool = False
    """Run the Ref role; needed by any KL term, by DPO and by teachers."""
    teacher_top_k: Annotated[int, Field(ge=0)] = 0
    """Most likely tokens that a teacher writes per position; 0: only the log-prob of the drawn token."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    bus: BusConfig = BusConfig()
    """The field store."""
    threads: Annotated[int, Field(ge=1)] = 1
    """Torch threads of each process. More than one per core slows every process down."""
    simulation: SimulationConfig | None = None
    """Time model of a cluster, for `relax simulate` and the backends named `simulated`."""
    trace_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of the prompt groups whose samples `relax trace` shows on their way through the roles; 0 is off. A traced
    sample costs its engine's process about 16 us."""
    faults: tuple[Fault, ...] = ()
    """Faults to inject, for tests of the safeguards. Empty in any real run."""
    fault_points: tuple[FaultPoint, ...] = ()
    """Processes that fail at named points, each once. `relax chaos` sets them; empty in any real run."""

    @property
    def generates(self) -> bool:
        """Whether engines and rewards take part."""
        return self.responses == "generated"

    @property
    def overdue_policy(self) -> Overdue:
        if self.overdue is not None:
            return self.overdue
        return Overdue.WAIT if self.max_staleness == 0 else Overdue.TRAIN

    @property
    def token_lag_bound(self) -> int:
        """Largest lag of a trained token under the configured policy."""
        if self.overdue_policy is not Overdue.TRAIN:
            return self.max_staleness
        return 2 * self.max_staleness + 2 if self.max_token_lag is None else self.max_token_lag

    @property
    def max_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens

    @model_validator(mode="after")
    def _lag_bounds(self) -> RunConfig:
        if self.max_token_lag is not None:
            if self.overdue_policy is not Overdue.TRAIN:
                raise ValueError("run.max_token_lag is only used with run.overdue 'train'")
            if self.max_token_lag < self.max_staleness:
                raise ValueError("run.max_token_lag must be at least run.max_staleness")
        return self

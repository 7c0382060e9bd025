"""Contract of the controller: what roles report, what it answers, what `/api/v1` shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from bus.records import BusAddress
from relax.telemetry.run_folder import json_lines

MAX_INSTANCES = 1024
"""More cannot be asked for in one run."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a role needs to join the run. `evaluated`: evaluations that an earlier part of the run made."""

    run_id: str
    bus: BusAddress
    heartbeat_s: float
    evaluated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent by each replica. `counters` only grow. `time_split`: seconds by kind since the replica's start."""

    role: str
    instance: str
    replica_id: str
    pid: int
    state: str
    waiting_for: str
    counters: dict[str, float]
    facts: dict[str, Any]
    time_split: dict[str, float]
    error: str | None = None
    fatal: str | None = None
    stopping: bool = False
    """It has heard that the run ends, and begins nothing more."""
    app: str = ""
    """Serve application of the replica."""
    node: str = ""
    started_s: float = 0.0
    """Start of its process, Unix seconds; 0 where it is not known."""
    number: int = 0
    """Counts the replica's heartbeats: one that was held up is older than what is known already."""


@dataclass(frozen=True, slots=True)
class Directive:
    """The controller's answer to a heartbeat."""

    stop: bool = False
    run_state: str = "starting"
    instances: int | None = None
    """To the rollout manager: how many training instances are wanted; None: as its configuration says."""
    replace: tuple[str, ...] = ()
    """To the rollout manager: instances to take away, each with another in its place."""


@dataclass(frozen=True, slots=True)
class AdoptionReport:
    """One weight adoption by an instance. `gap_*`: |trainer - engine| log-prob on the probe, in nats."""

    instance: str
    version: int
    digest: str
    digest_ok: bool
    gap_max: float
    gap_mean: float
    seconds: float


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One generation with its reward, as `samples.jsonl` keeps it."""

    row_id: str
    purpose: str
    version: int
    prompt: str
    response: str
    label: Any
    reward: float | None
    accuracy: float | None
    parts: dict[str, float]
    reward_state: str
    finish_reason: str


def sample_lines(samples: Iterable[SampleRecord]) -> bytes:
    """As they lie in `samples.jsonl`: made where the samples are, so that hundreds of them travel as one string."""
    samples = list(samples)
    try:
        return b"".join(orjson.dumps(sample, option=orjson.OPT_APPEND_NEWLINE) for sample in samples)
    except TypeError:  # a label with an integer above 64 bits
        return json_lines(samples)


@dataclass(frozen=True, slots=True)
class EvalReport:
    """One held-out evaluation, in the order of the fixed prompts."""

    when: str
    version: int
    accuracy: tuple[float, ...]
    """Mean over the answers of each prompt."""
    parts: dict[str, float] = field(default_factory=dict)
    pass_at: dict[int, float] = field(default_factory=dict)
    """k -> chance that one of k answers is right."""


class RoleView(BaseModel):
    """One replica as the controller sees it."""

    role: str = Field(description="actor, ref, rollout, reward, dcs or instance")
    instance: str = Field(description="Serve application")
    state: str = Field(description="The replica's own word; 'lost' after silence")
    waiting_for: str
    pid: int
    node: str = ""
    heartbeat_age_s: float
    progress_age_s: float = Field(description="Seconds since one of its counters moved")
    restarts: int
    version: int | None = Field(default=None, description="Policy version it holds, where it holds one")
    counters: dict[str, float] = Field(default_factory=dict)
    time_split: dict[str, float] = Field(default_factory=dict)
    error: str | None = None


class Status(BaseModel):
    """`GET /api/v1/status`."""

    run: str
    state: str = Field(description="starting, running, finishing, finished, failed or stopped")
    reason: str | None = None
    step: int
    steps: int
    wall_s: float
    run_dir: str
    metrics: dict[str, float] = Field(default_factory=dict, description="Last step's record")
    roles: list[RoleView] = Field(default_factory=list)
    bus: dict[str, Any] = Field(default_factory=dict)
    stalled: list[str] = Field(default_factory=list, description="The watchdog's sentences, empty while things move")
    restarts_unasked: int = 0
    summary: dict[str, Any] | None = Field(default=None, description="Present once finished or failed")
    violations: list[str] = Field(default_factory=list, description="Expectations that the finished run broke")
    tracker_errors: dict[str, str] = Field(default_factory=dict, description="Trackers that lost records, and why")


class Health(BaseModel):
    """`GET /api/v1/health`: healthy is false when a role is lost or failed."""

    healthy: bool
    problems: list[str]


class ScaleRequest(BaseModel):
    """Body of `POST /api/v1/rollout/scale`."""

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(ge=1, le=MAX_INSTANCES, strict=True, description="Training instances that are wanted")


class StepView(BaseModel):
    name: str
    begin_s: float = Field(description="Unix seconds")
    end_s: float | None
    detail: str


class OperationView(BaseModel):
    """Something that the controller does, or did."""

    id: str
    kind: str = Field(description="scale, wait, restart_replica, redeploy, replace_instance, renew_bus, ...")
    target: str
    cause: str
    state: str = Field(description="pending, running, succeeded, failed or cancelled")
    created_s: float = Field(description="Unix seconds, as all times here")
    started_s: float | None
    ended_s: float | None
    not_before_s: float = Field(description="The end of its back-off")
    steps: list[StepView]
    error: str
    incident: str | None = Field(description="The incident that it answers")
    request: dict[str, Any] = Field(default_factory=dict)


class IncidentView(BaseModel):
    """Something that went wrong."""

    id: str
    fault: str
    role: str
    instance: str
    node: str
    pid: int
    at_s: float = Field(description="Unix seconds")
    detail: str
    last_progress_s: float | None = Field(description="Seconds between its last progress and the incident")
    traceback: str | None
    decision: str
    operation: str | None
    ended_s: float | None = Field(description="None: it is still so")


class Quiescence(BaseModel):
    """`GET /api/v1/quiescence`: what is in flight, by role; `quiescent` is true when nothing is."""

    quiescent: bool
    in_flight: dict[str, dict[str, float]] = Field(description="Role or `bus` -> what -> how many")


class Problem(BaseModel):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


class Accepted(BaseModel):
    """Answer of a mutation."""

    state: str

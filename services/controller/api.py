"""Contract of the controller: what roles report, what it answers, what `/api/v1` shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import BaseModel, Field

from bus.records import BusAddress
from relax.telemetry.run_folder import json_lines


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


@dataclass(frozen=True, slots=True)
class Directive:
    """The controller's answer to a heartbeat."""

    stop: bool = False
    run_state: str = "starting"


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


class Accepted(BaseModel):
    """Answer of a mutation."""

    state: str

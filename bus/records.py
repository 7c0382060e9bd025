"""Requests, replies, events and errors of the bus: everything that crosses its border.

Wire records that occur once per row are tuples (cheap to pickle); the rest are frozen dataclasses.
The bus moves NumPy arrays and JSON values; it never pickles them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relax.types import Json, PolicyVersion, Purpose

Array = npt.NDArray[Any]
FieldValue = Array | Json
Scalar = str | int | float | bool | None
Tags = Mapping[str, Scalar]

PROMPTS = "prompts"
SAMPLES = "samples"
TRAINING = "training"
"""Closed in place of `prompts` when only groups of purpose train have ended: evaluations may follow."""
DRAIN = "drain"
"""Release reason of a consumer that hands work back in good order: the delivery does not count."""


CLOSED = "closed"
"""Why an admission or a row was refused: its topic was closed before."""
DEAD_LETTER = "dead_letter"
"""Fate of what was handed out too often."""


class VerdictKind(enum.StrEnum):
    ACCEPTED = "accepted"
    FILTERED = "filtered"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class BusAddress:
    """Where the bus of one run is found. Plain strings: it can be put in a file."""

    run_id: str
    namespace: str
    engine: str
    stores: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: part of every call, so that an old incarnation or an old epoch is refused."""

    owner: str
    incarnation: int
    epoch: str


@dataclass(frozen=True, slots=True)
class GroupAdmission:
    """One prompt group. (group_id, attempt) makes it idempotent; a higher attempt re-admits it."""

    group_id: str
    seq: int
    group_size: int
    min_version: PolicyVersion
    prompt: Json
    purpose: Purpose = Purpose.TRAIN
    attempt: int = 0
    tags: Tags = field(default_factory=dict)
    accept_rows: bool = False
    """No filter will judge the group: its rows are accepted as they arrive, so Ref works beside Reward."""


class AdmitHeader(NamedTuple):
    """A `GroupAdmission` on the wire: the prompt itself goes to the storage."""

    group_id: str
    seq: int
    group_size: int
    min_version: int
    purpose: str
    attempt: int
    tags: dict[str, Scalar]
    accept_rows: bool = False


@dataclass(frozen=True, slots=True)
class RowPut:
    """Fields for one row. `tags` set before the row is visible.

    The client adds tags of its own: scalar fields and `reward_state` under their names, `tokens`
    (T), `oldest_version` and `newest_version` from `versions`. A trajectory of several segments
    says how many in the tag `segments` (default 1).
    """

    row_id: str
    group_id: str
    fields: Mapping[str, FieldValue]
    tags: Tags = field(default_factory=dict)


class RowHeader(NamedTuple):
    """What the index learns of a row: digests and sizes, not the bytes.

    fields: (name, digest, bytes) of each. `admission` is set for prompt rows only.
    """

    row_id: str
    group_id: str
    fields: tuple[tuple[str, bytes, int], ...]
    tags: dict[str, Scalar]
    admission: AdmitHeader | None = None


class PlannedRow(NamedTuple):
    """Where the accepted fields of a row go: one blob in `column` of the storage row `slot`."""

    row_id: str
    slot: int
    partition: str
    fields: tuple[str, ...]


class PutPlan(NamedTuple):
    put_id: str
    column: str
    rows: tuple[PlannedRow, ...]
    repeated: int
    refused: tuple[tuple[str, str], ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class PutResult:
    """`stored`: fields made visible. `repeated`: fields already there with equal digest.

    `refused`: (row_id, reason) of each refused field or row; reasons are `digest` (another value
    is there), `terminal` (group or member already ended) and `closed`.
    `ended`: the put acknowledged the last item of its lease.
    """

    stored: int
    repeated: int
    refused: tuple[tuple[str, str], ...] = ()
    ended: bool = False


@dataclass(frozen=True, slots=True)
class AdmitResult:
    """`settled`: (group_id, fate) of groups that already ended and were not taken again."""

    admitted: int
    repeated: int
    settled: tuple[tuple[str, str], ...] = ()


TEACHER_TASK = "teacher:"
"""Begins the task of one teacher: rows whose tag `teacher` is the name that follows."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What a consumer asks for. A retry with the same `lease_id` gets the same batch.

    task: rollout | reward | ref | actor | teacher:<name>. fields: needed and delivered; `prompt` may be asked for
    by any task. max_items: rows for row-level tasks (reward, ref), groups for rollout and actor.
    produces: a row that already has these is not offered again. version: the caller's policy
    version (rollout: groups with a larger min_version are withheld; actor: the lag is computed
    against it). ttl_s: default from the bus configuration.

    rollout: `rows_per_member` and `bytes_per_member` override the worst case that is reserved.
    actor: `max_rows` bounds the rows (one group is always taken); `max_token_lag` bounds the lag
    of a group's oldest token; `slots_left`, `hold_below` and `groups_per_step` are the overdue rule
    (bus.index.overdue): old groups keep their place among the `slots_left` groups still wanted.
    """

    task: str
    fields: tuple[str, ...]
    max_items: int = 1
    lease_id: str = ""
    ttl_s: float | None = None
    produces: tuple[str, ...] = ()
    purposes: tuple[Purpose, ...] = (Purpose.TRAIN, Purpose.EVAL)
    version: PolicyVersion | None = None
    rows_per_member: int = 1
    bytes_per_member: int | None = None
    max_rows: int | None = None
    max_token_lag: int | None = None
    slots_left: int | None = None
    hold_below: PolicyVersion | None = None
    groups_per_step: int | None = None


class BlobRef(NamedTuple):
    """One blob of a row and the fields wanted from it, each with its digest."""

    slot: int
    column: str
    owner_row: str
    fields: tuple[tuple[str, bytes], ...]


class RowGrant(NamedTuple):
    row_id: str
    group_id: str
    k: int
    segment: int
    tags: dict[str, Scalar]
    blobs: tuple[BlobRef, ...]


class GroupInfo(NamedTuple):
    """One group of a lease. `done`: members that need no generation; `tombstones`: k -> reason."""

    group_id: str
    seq: int
    attempt: int
    group_size: int
    min_version: int
    purpose: str
    tags: dict[str, Scalar]
    done: tuple[int, ...]
    tombstones: dict[int, str]
    reserved_rows: int
    reserved_bytes: int

    @property
    def missing(self) -> tuple[int, ...]:
        """Members still to be generated."""
        return tuple(k for k in range(self.group_size) if k not in self.done)


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease as the index gives it, before the client has read the bytes."""

    lease_id: str
    task: str
    ttl_s: float
    rows: tuple[RowGrant, ...]
    groups: tuple[GroupInfo, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A row as a consumer gets it. Prompt rows have k = segment = -1."""

    row_id: str
    group_id: str
    k: int
    segment: int
    fields: dict[str, FieldValue]
    tags: dict[str, Scalar]

    def array(self, name: str) -> Array:
        """The array field `name`; a TypeError if it is a JSON field."""
        value = self.fields[name]
        if not isinstance(value, np.ndarray):
            raise TypeError(f"field {name!r} of {self.row_id} is not an array")
        return value

    def json(self, name: str) -> Json:
        """The JSON field `name`; a TypeError if it is an array field."""
        value = self.fields[name]
        if isinstance(value, np.ndarray):
            raise TypeError(f"field {name!r} of {self.row_id} is an array")
        return value


@dataclass(frozen=True, slots=True)
class Lease:
    """A batch held by one consumer until it acknowledges, releases, or lets it expire."""

    lease_id: str
    task: str
    ttl_s: float
    rows: tuple[Row, ...]
    groups: tuple[GroupInfo, ...]


@dataclass(frozen=True, slots=True)
class Empty:
    """Nothing now. reason: `none` | `budget` | `version` | `held` (kept for overdue groups)."""

    reason: str = "none"


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing now and nothing ever: the topic is closed and drained."""

    task: str


@dataclass(frozen=True, slots=True)
class AckResult:
    """`acked`: items ended. `void`: items that ended otherwise meanwhile (group dropped)."""

    acked: int
    void: tuple[str, ...] = ()
    retained_over_budget: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    group_id: str
    kind: VerdictKind
    reason: str = ""


class EventKind(enum.StrEnum):
    COMPLETE = "complete"
    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"
    """Ended untrained: by a verdict or a drop, as `stale`, or as a dead letter; the reason says which."""
    DEAD_ROW = "dead_row"
    """A member was handed out too often and ended; its group goes on."""


class MemberReport(NamedTuple):
    """One member of a complete group. `tags` are those of its rows, later segments winning."""

    k: int
    tombstone: str | None
    tags: dict[str, Scalar]

    @property
    def reward(self) -> float | None:
        return _number(self.tags.get("reward"))

    @property
    def accuracy(self) -> float | None:
        return _number(self.tags.get("accuracy"))

    @property
    def reward_state(self) -> str | None:
        state = self.tags.get("reward_state")
        return state if isinstance(state, str) else None


@dataclass(frozen=True, slots=True)
class Event:
    """`seq` grows by one per event. `row_id` is set for `dead_row`, `step` and `version` for `trained`.

    `version`: the newest that was published when the step was committed. `samples`: of a group that ended, its produced
    samples by fate.
    """

    seq: int
    kind: EventKind
    group_id: str
    purpose: Purpose
    members: tuple[MemberReport, ...] = ()
    step: int | None = None
    row_id: str | None = None
    reason: str | None = None
    samples: Mapping[str, int] = field(default_factory=dict)
    version: int | None = None


class TrainedStep(NamedTuple):
    """A step that the trainer has taken: its groups, each with the number of samples that were trained.

    `version`: the newest published one; a step that is trained again after a rollback publishes none.
    """

    step: int
    version: int
    groups: dict[str, int]


class Rollback(NamedTuple):
    """A new lineage of training, that goes on from the state after `to_step`.

    `group_ids`: those that the ledger has as trained after that step in the lineage before.
    """

    lineage: int
    to_step: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Account:
    """Train samples, counted by sample id: produced = trained + dropped + queued (B16).

    `running` (being generated) and `waiting` (admitted, not leased) are outside the sum.
    """

    produced: int
    trained: int
    dropped: dict[str, int]
    queued: int
    running: int
    waiting: int

    @property
    def balanced(self) -> bool:
        return self.produced == self.trained + sum(self.dropped.values()) + self.queued


class HeldLease(NamedTuple):
    """One open lease; `age_s` since it was given."""

    task: str
    owner: str
    items: int
    age_s: float


@dataclass(frozen=True, slots=True)
class BusStats:
    """One atomic snapshot. Bytes are charged bytes: the worst case until a row has ended."""

    epoch: str
    account: Account
    eval_produced: int
    eval_held: int
    rows: int
    bytes: int
    reserved_rows: int
    reserved_bytes: int
    retained_rows: int
    retained_bytes: int
    max_rows: int
    max_bytes: int
    retained_max_bytes: int
    open_groups: int
    ready: dict[str, int]
    leases: dict[str, int]
    held: tuple[HeldLease, ...]
    counters: dict[str, int]
    version: int
    step: int
    oldest_min_version: int | None
    oldest_age_s: float
    events_pending: int
    closed: tuple[str, ...]


def _number(value: Scalar) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None

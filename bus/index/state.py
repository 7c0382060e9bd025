"""What the index knows: groups, members, rows, claims. Data only; the transitions are elsewhere."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from bus.index.budget import Budget
from bus.records import AckResult, AdmitHeader, Caller, Event, LeaseRequest, Scalar, TrainedStep, VerdictKind
from relax.types import Purpose

TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one bus. `bytes_per_token` and `fixed_bytes` give the worst case of one row."""

    max_rows: int
    max_bytes: int
    retained_max_bytes: int
    max_tokens: int
    bytes_per_token: int
    fixed_bytes: int
    lease_ttl_s: float
    max_deliveries: int
    partition_rows: int
    complete_fields: tuple[str, ...] = ("reward",)
    plan_ttl_s: float = 60.0

    def worst_bytes(self, tokens: int | None = None) -> int:
        """Most bytes that one row of `tokens` tokens can come to hold, all fields together."""
        return (self.max_tokens if tokens is None else tokens) * self.bytes_per_token + self.fixed_bytes


@dataclass(slots=True)
class StoredField:
    column: str
    digest: bytes


@dataclass(slots=True)
class Row:
    """One storage row. Visible once it has a field; `charge` are its bytes in the budget."""

    row_id: str
    group_id: str
    k: int
    segment: int
    slot: int
    partition: str
    fields: dict[str, StoredField] = field(default_factory=dict)
    tags: dict[str, Scalar] = field(default_factory=dict)
    next_column: int = 0
    bytes: int = 0
    charge: int = 0
    done: set[str] = field(default_factory=set)
    leases: dict[str, str] = field(default_factory=dict)
    deliveries: Counter[str] = field(default_factory=Counter)

    @property
    def visible(self) -> bool:
        return bool(self.fields)


@dataclass(slots=True)
class Member:
    """Sample k of a group. `fate` is set once its sample ended: trained, or why it was dropped."""

    rows: dict[int, Row] = field(default_factory=dict)
    tombstone: str | None = None
    fate: str | None = None
    counted: bool = False
    reserved_rows: int = 0
    reserved_bytes: int = 0

    @property
    def visible(self) -> bool:
        return any(row.visible for row in self.rows.values())

    @property
    def produced(self) -> bool:
        """Every segment is visible."""
        if len(self.rows) == 1:  # nearly always
            [row] = self.rows.values()
            return row.visible and int(row.tags.get("segments") or 1) <= 1
        shown = [row for row in self.rows.values() if row.visible]
        segments = max((int(row.tags.get("segments") or 1) for row in shown), default=1)
        return len(shown) >= segments

    @property
    def missing(self) -> bool:
        """Still to be generated."""
        return self.tombstone is None and not self.produced

    def has(self, fields: frozenset[str]) -> bool:
        return self.produced and all(fields <= row.fields.keys() for row in self.rows.values() if row.visible)


@dataclass(slots=True)
class Claim:
    """Who holds a group for one task, and how often it was handed out."""

    lease_id: str | None = None
    deliveries: int = 0


@dataclass(slots=True)
class Group:
    spec: AdmitHeader
    prompt: Row
    admitted_at: float
    members: list[Member]
    verdict: VerdictKind | None = None
    fate: str | None = None
    step: int | None = None
    complete: bool = False
    rollout: Claim = field(default_factory=Claim)
    actor: Claim = field(default_factory=Claim)
    holds: int = 0
    freed: bool = False
    retained: bool = False
    """Trained, now or before a rollback: its rows have a budget of their own, until a checkpoint covers them."""
    replay: int | None = None
    """Its place among the groups that were taken back by a rollback: they are trained again in the old order."""
    tally: Counter[str] | None = None
    """Once ended: its produced samples by fate."""
    last_event: int = 0

    @property
    def purpose(self) -> Purpose:
        return Purpose(self.spec.purpose)

    @property
    def is_train(self) -> bool:
        return self.spec.purpose == Purpose.TRAIN.value

    @property
    def order(self) -> tuple[int, int]:
        return self.spec.min_version, self.spec.seq

    @property
    def train_order(self) -> tuple[bool, int, int]:
        """What was trained before a rollback comes first, as it came then."""
        return (True, *self.order) if self.replay is None else (False, self.replay, 0)

    @property
    def missing(self) -> bool:
        return any(member.missing for member in self.members)

    def sample_rows(self) -> Iterator[Row]:
        for member in self.members:
            yield from member.rows.values()

    def live_rows(self) -> list[Row]:
        """Visible rows of members that can be trained, in order of (k, segment)."""
        return [
            row
            for member in self.members
            if member.tombstone is None
            for _, row in sorted(member.rows.items())
            if row.visible
        ]

    def oldest_version(self) -> int:
        """Version of the oldest token; `min_version` where no row says."""
        tags = (row.tags.get("oldest_version") for row in self.live_rows())
        return min((int(tag) for tag in tags if tag is not None), default=self.spec.min_version)


@dataclass(frozen=True, slots=True)
class Garbage:
    """A storage row to be freed, and what then returns to the budget."""

    slot: int
    partition: str
    rows: int
    bytes: int
    retained: bool = False


@dataclass(slots=True)
class LeaseState:
    lease_id: str
    task: str
    owner: str
    incarnation: int
    ttl_s: float
    expires_at: float
    items: dict[str, None]
    request: LeaseRequest
    since: float = 0.0


@dataclass(slots=True)
class Plan:
    """A put between its plan and its commit. `reserved`: (rows, bytes) of rows without a lease."""

    put_id: str
    owner: str
    incarnation: int
    lease_id: str | None
    column: str
    expires_at: float
    rows: list[PlannedFields]
    ack: tuple[str, ...] = ()
    """Items of the lease that end with this put, if nothing of them is missing then."""
    reserved_rows: int = 0
    reserved_bytes: int = 0
    repeated: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class PlannedFields:
    row: Row
    fields: tuple[tuple[str, bytes, int], ...]
    tags: dict[str, Scalar]
    admission: AdmitHeader | None


@dataclass(slots=True)
class State:
    """Everything, shared by the parts of the index."""

    limits: Limits
    budget: Budget
    groups: dict[str, Group] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    leases: dict[str, LeaseState] = field(default_factory=dict)
    acknowledged: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Lease id -> (owner, incarnation) of the last leases that ended well: a repeated call is told so."""
    plans: dict[str, Plan] = field(default_factory=dict)
    committed: tuple[tuple[Caller, TrainedStep], AckResult] | None = None
    """The last commit of a step and its answer, for a caller that did not hear it."""
    incarnations: dict[str, int] = field(default_factory=dict)
    steps_of: dict[int, int] = field(default_factory=dict)
    version: int = 0
    """The newest that was published."""
    step: int = 0
    """The newest that was trained in this lineage."""
    lineage: int = 0
    collected_through: int = 0
    """Rows of groups trained up to this step were freed."""
    closed: set[str] = field(default_factory=set)
    counters: Counter[str] = field(default_factory=Counter)
    produced: int = 0
    eval_produced: int = 0
    settled: Counter[str] = field(default_factory=Counter)
    prompt_rows: int = 0
    prompt_bytes: int = 0
    unproduced: set[str] = field(default_factory=set)
    incomplete: set[str] = field(default_factory=set)
    open_train: set[str] = field(default_factory=set)
    largest_group: int = 0
    waiting_by_version: Counter[int] = field(default_factory=Counter)
    trained_in: dict[int, list[str]] = field(default_factory=dict)
    garbage: deque[Garbage] = field(default_factory=deque)
    trained_elsewhere: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Groups trained from rows of an earlier epoch: (step, samples)."""
    seeded_through: int | None = None
    """The newest step that the ledger knew when it told this epoch what happened in earlier ones."""
    events: deque[Event] = field(default_factory=deque)
    event_seq: int = 0
    events_acked: int = 0
    forgettable: deque[str] = field(default_factory=deque)
    forgotten: dict[str, int] = field(default_factory=dict)
    """Group id -> attempt of the last groups that were forgotten: an admission that comes late is not a new one."""
    woken: set[str] = field(default_factory=set)

    def lag(self, version: int) -> int:
        """Steps since the step that published this version, at least 0: after a rollback it may be yet to come."""
        return max(0, self.step - self._step_of(version))

    def _step_of(self, version: int) -> int:
        """Before the first that a step is known of, one was published each step."""
        known = self.steps_of.get(version)
        if known is not None or not self.steps_of:
            return version if known is None else known
        first = next(iter(self.steps_of))
        return self.steps_of[first] - (first - version)

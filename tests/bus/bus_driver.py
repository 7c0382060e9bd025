"""Drives the pure index as the clients would: a slot allocator, a clock, and short calls."""

from __future__ import annotations

import hashlib
import itertools
import uuid
from typing import Any

from bus.index import Index, Limits
from bus.records import (
    AckResult,
    AdmitHeader,
    Caller,
    Closed,
    Empty,
    Event,
    Grant,
    LeaseRequest,
    PutResult,
    RowHeader,
    Verdict,
    VerdictKind,
)
from relax.types import PolicyVersion, Purpose

FIELDS = ("tokens", "loss_mask", "rollout_logprobs", "versions")


def limits(**changes: Any) -> Limits:
    base: dict[str, Any] = {
        "max_rows": 200,
        "max_bytes": 1 << 20,
        "retained_max_bytes": 1 << 20,
        "max_tokens": 10,
        "bytes_per_token": 10,
        "fixed_bytes": 100,
        "lease_ttl_s": 10.0,
        "max_deliveries": 3,
        "partition_rows": 16,
    }
    return Limits(**(base | changes))


class Driver:
    def __init__(self, **changes: Any) -> None:
        self.index = Index(limits(**changes), epoch="e")
        self.now = 0.0
        self._slots = itertools.count()
        self.callers: dict[str, Caller] = {}
        for owner in ("manager", "rollout", "reward", "ref", "actor"):
            self.callers[owner] = self.index.register(owner, 0.0)

    # -- producing

    def plan(
        self,
        owner: str,
        rows: list[RowHeader],
        lease_id: str | None = None,
        put_id: str | None = None,
        ack: bool = False,
    ) -> Any:
        return self.index.plan_put(
            self.callers[owner],
            put_id or uuid.uuid4().hex,
            tuple(rows),
            lease_id,
            ack,
            self.now,
            lambda partition: next(self._slots),
        )

    def put(self, owner: str, rows: list[RowHeader], lease_id: str | None = None, ack: bool = False) -> PutResult:
        plan = self.plan(owner, rows, lease_id, ack=ack)
        assert plan is not None, "no room"
        if not plan.rows:
            return PutResult(0, plan.repeated, plan.refused, plan.ended)
        return self.index.commit_put(self.callers[owner], plan.put_id, self.now)

    def admission(
        self,
        group_id: str,
        seq: int,
        size: int = 2,
        min_version: int = 0,
        purpose: str = "train",
        attempt: int = 0,
        accept_rows: bool = False,
    ) -> RowHeader:
        spec = AdmitHeader(group_id, seq, size, min_version, purpose, attempt, {}, accept_rows)
        return RowHeader(group_id, group_id, (("prompt", digest("prompt"), 20),), {}, spec)

    def admit(self, group_id: str, seq: int, size: int = 2, **more: Any) -> PutResult:
        return self.put("manager", [self.admission(group_id, seq, size, **more)])

    def sample(
        self, group_id: str, k: int, segment: int = 0, tokens: int = 5, value: str = "", **tags: Any
    ) -> RowHeader:
        row_id = f"{group_id}/{k}/{segment}"
        fields = tuple((name, digest(row_id + name + value), 4 * tokens) for name in FIELDS)
        return RowHeader(row_id, group_id, fields, {"tokens": tokens, **tags})

    def reward_of(self, row_id: str, value: float = 1.0) -> RowHeader:
        fields = (("reward", digest(f"{row_id}{value}"), 4),)
        return RowHeader(row_id, row_id.split("/")[0], fields, {"reward": value, "accuracy": value})

    # -- leasing

    def lease(self, task: str, owner: str | None = None, **more: Any) -> Grant | Empty | Closed:
        by_task = {"rollout": ("prompt",), "actor": ("tokens", "reward")}
        fields = by_task.get(task, ("tokens",))
        request = {"task": task, "fields": fields, "lease_id": uuid.uuid4().hex, "max_items": 1, **more}
        if task == "reward":
            request = {"produces": ("reward",), **request}
        return self.index.lease(self.callers[owner or task], LeaseRequest(**request), self.now)

    def granted(self, task: str, **more: Any) -> Grant:
        grant = self.lease(task, **more)
        assert isinstance(grant, Grant), grant
        return grant

    def ack(
        self, owner: str, lease_id: str, items: tuple[str, ...] | None = None, step: int | None = None
    ) -> AckResult:
        return self.index.ack(self.callers[owner], lease_id, items, step, self.now)

    def release(self, owner: str, lease_id: str, reason: str = "error") -> int:
        return self.index.release(self.callers[owner], lease_id, None, reason, self.now)

    # -- whole stages

    def generate(self, **tags: Any) -> str:
        """Lease one group, produce its missing members, acknowledge. Returns the group id."""
        grant = self.granted("rollout")
        group = grant.groups[0]
        self.put("rollout", [self.sample(group.group_id, k, **tags) for k in group.missing], grant.lease_id)
        self.ack("rollout", grant.lease_id)
        return group.group_id

    def score(self, count: int = 100, value: float = 1.0) -> list[str]:
        grant = self.granted("reward", max_items=count)
        rows = [row.row_id for row in grant.rows]
        self.put("reward", [self.reward_of(row_id, value) for row_id in rows], grant.lease_id)
        self.ack("reward", grant.lease_id)
        return rows

    def judge(self, group_id: str, kind: VerdictKind = VerdictKind.ACCEPTED, reason: str = "") -> int:
        return self.index.judge(self.callers["manager"], (Verdict(group_id, kind, reason),), self.now)

    def ready_group(self, group_id: str, seq: int, size: int = 2, **more: Any) -> None:
        """Admit, generate, score and accept a group."""
        self.admit(group_id, seq, size, **more)
        assert self.generate(oldest_version=more.get("min_version", 0)) == group_id
        self.score()
        self.judge(group_id)

    def events(self, after: int = 0) -> list[Event]:
        return self.index.events(self.callers["manager"], after, self.now)

    def collect(self) -> int:
        garbage = self.index.take_garbage()
        self.index.freed(garbage)
        return len(garbage)


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number)


EVAL = Purpose.EVAL.value

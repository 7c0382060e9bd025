"""How many prompt groups may be in flight, and what becomes of the late ones.

Counted in groups, with B = groups per step and S = max staleness:

    outstanding = admitted - trained - filtered - dropped  <=  (S + 1) x B                    (B15)

`trained` advances only together with the version that the step published. A group carries the version at
its admission, and no engine older than that generates it, so the lag of its tokens is at most the number
of versions published since. Why the lag then keeps its bound:

- `wait`: the trainer leaves slots of its step to older groups where they would else be late
  (`bus.index.overdue`): earliest deadline first. A group has at most (S + 1) x B groups, itself included, that are
  due no later, and S + 1 steps for them.
- `drop`: a group not complete when it can no longer be trained in time is dropped; a complete one is
  trained while the lag of its oldest token is within the bound, else dropped as stale.
- `train`: the same with the larger bound `max_token_lag` in place of S.
- All: a group not complete by its deadline is dropped, so that nothing waits for ever (B18).

The last groups of a run are counted out: no more are admitted than its steps still need.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from relax.config.run import Overdue, RunConfig
from relax.types import GroupId, PolicyVersion, RelaxError


class AdmissionRefused(RelaxError):
    """More groups than the capacity allows, or the same group twice: the caller's counts are wrong."""


class DropReason(enum.StrEnum):
    """Why a group was given up by admission."""

    DEADLINE = "deadline"
    """Not complete `group_deadline_s` after its admission."""
    OVERDUE = "overdue"
    """Not complete when its lag would exceed the bound of the policy."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The configured numbers; `from_run` is the usual way to get them."""

    groups_per_step: int
    max_staleness: int
    steps: int
    policy: Overdue
    token_lag_bound: int
    """Largest `version now - version of the oldest token` of a group that is trained."""
    deadline_s: float

    @classmethod
    def from_run(cls, run: RunConfig) -> Limits:
        return cls(
            groups_per_step=run.groups_per_step,
            max_staleness=run.max_staleness,
            steps=run.steps,
            policy=run.overdue_policy,
            token_lag_bound=run.token_lag_bound,
            deadline_s=run.group_deadline_s,
        )

    @property
    def max_outstanding(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def groups_needed(self) -> int:
        return self.steps * self.groups_per_step


@dataclass(slots=True)
class OpenGroup:
    """Admitted and not yet trained, filtered or dropped."""

    group_id: GroupId
    min_version: PolicyVersion
    admitted_at_s: float
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    group_id: GroupId
    reason: DropReason


def hold_below(version: PolicyVersion, max_staleness: int, policy: Overdue) -> PolicyVersion | None:
    """Groups admitted at or below the answer must be in the step that starts from `version`.

    None: no group has to; only `wait` holds a step.
    """
    return PolicyVersion(version - max_staleness) if policy is Overdue.WAIT else None


def trainable_lag(oldest_token: PolicyVersion, version: PolicyVersion, limits: Limits) -> bool:
    """Whether a complete group may be trained by the step that starts from `version`."""
    return version - oldest_token <= limits.token_lag_bound


def overdue_groups(groups: Iterable[OpenGroup], version: PolicyVersion, max_staleness: int) -> list[OpenGroup]:
    """Groups admitted at `version - max_staleness` or earlier that are not complete, oldest first."""
    late = (group for group in groups if not group.complete and group.min_version <= version - max_staleness)
    return sorted(late, key=lambda group: group.min_version)


def due_drops(groups: Iterable[OpenGroup], version: PolicyVersion, now_s: float, limits: Limits) -> list[Drop]:
    """Incomplete groups to give up now: past their deadline under any policy, and those that became too old
    under `drop` (by more than S) and `train` (by more than the token lag bound)."""
    drops = []
    for group in groups:
        if group.complete:
            continue
        if now_s - group.admitted_at_s >= limits.deadline_s:
            drops.append(Drop(group.group_id, DropReason.DEADLINE))
        elif limits.policy is not Overdue.WAIT and version - group.min_version > limits.token_lag_bound:
            drops.append(Drop(group.group_id, DropReason.OVERDUE))
    return drops


class AdmissionState:
    """The counts of one run. No clock and no I/O: times are arguments, and every change is a method.

    After a restart build it from the ledger: the totals of the current lineage in the constructor, then
    `admit` the open groups as capacity allows, before any new ones.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        version: PolicyVersion = PolicyVersion(0),  # noqa: B008  (an int)
        trained: int = 0,
        filtered: int = 0,
        dropped: Counter[str] | None = None,
    ):
        self.limits = limits
        self.version = version
        self.trained = trained
        self.filtered = filtered
        self.dropped: Counter[str] = Counter(dropped or {})
        self.exhausted = False
        """The prompt source has no more groups."""
        self._open: dict[GroupId, OpenGroup] = {}

    @property
    def outstanding(self) -> int:
        return len(self._open)

    @property
    def admitted(self) -> int:
        return self.trained + self.filtered + self.dropped.total() + self.outstanding

    @property
    def open_groups(self) -> list[OpenGroup]:
        """In the order of admission."""
        return list(self._open.values())

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        room = self.limits.max_outstanding - self.outstanding
        still_needed = self.limits.groups_needed - self.trained - self.outstanding
        return max(0, min(room, still_needed))

    @property
    def closing(self) -> bool:
        """No group will be admitted any more: the prompts topic may be closed."""
        return self.exhausted or self.trained >= self.limits.groups_needed

    @property
    def finished(self) -> bool:
        return self.closing and self.outstanding == 0

    def admit(self, group_id: GroupId, now_s: float) -> PolicyVersion:
        """Take up a group; return the `min_version` of its prompt row. Raises `AdmissionRefused`."""
        if group_id in self._open:
            raise AdmissionRefused(f"group {group_id} is in flight already")
        if self.capacity < 1:
            raise AdmissionRefused(
                f"no capacity for group {group_id}: {self.outstanding} of {self.limits.max_outstanding} in flight, "
                f"{self.trained} of {self.limits.groups_needed} trained"
            )
        self._open[group_id] = OpenGroup(group_id, self.version, now_s)
        return self.version

    def take_up(self, group_id: GroupId, min_version: PolicyVersion, now_s: float, *, complete: bool = False) -> None:
        """A group that was in flight before this state was built, or before what it had been trained in was undone.

        It has its place whatever the capacity is: what comes after it waits.
        """
        self._open[group_id] = OpenGroup(group_id, min_version, now_s, complete)

    def undo(self, groups: Iterable[GroupId], now_s: float) -> None:
        """Trained groups that are in flight again, complete: the trainer went back to an older state.

        Until they are trained again more than `max_outstanding` groups may be in flight; none is admitted meanwhile.
        """
        for group_id in groups:
            self.trained -= 1
            self.take_up(group_id, self.version, now_s, complete=True)

    def forget(self, group_id: GroupId) -> bool:
        """Its rows are lost: it will be admitted once more, when there is capacity. False when it was not open."""
        return self._close(group_id)

    def mark_complete(self, group_id: GroupId) -> bool:
        """Every member is terminal. False for a group that is not open."""
        group = self._open.get(group_id)
        if group is None:
            return False
        group.complete = True
        return True

    def step_committed(self, version: PolicyVersion, group_ids: Iterable[GroupId]) -> int:
        """A step trained these groups and published `version`; return how many were open.

        One call, because a reservation that returned before the new version is known would be given to a
        group with too small a `min_version`. A version never goes back.
        """
        if version < self.version:
            raise ValueError(f"version {version} after version {self.version}")
        self.version = version
        closed = sum(self._close(group_id) for group_id in group_ids)
        self.trained += closed
        return closed

    def mark_filtered(self, group_id: GroupId) -> bool:
        """False for a group that is not open: nothing is counted twice."""
        closed = self._close(group_id)
        self.filtered += closed
        return closed

    def mark_dropped(self, group_id: GroupId, reason: str) -> bool:
        """False for a group that is not open: nothing is counted twice."""
        closed = self._close(group_id)
        self.dropped[reason] += closed
        return closed

    def due_drops(self, now_s: float) -> list[Drop]:
        """See the function. The caller drops them in ledger and bus, then calls `mark_dropped`."""
        return due_drops(self._open.values(), self.version, now_s, self.limits)

    def overdue_groups(self) -> list[OpenGroup]:
        return overdue_groups(self._open.values(), self.version, self.limits.max_staleness)

    def hold_below(self) -> PolicyVersion | None:
        return hold_below(self.version, self.limits.max_staleness, self.limits.policy)

    def next_deadline_s(self) -> float | None:
        """When `due_drops` may next have an answer by time alone."""
        waiting = [group.admitted_at_s for group in self._open.values() if not group.complete]
        return min(waiting) + self.limits.deadline_s if waiting else None

    def _close(self, group_id: GroupId) -> bool:
        return self._open.pop(group_id, None) is not None

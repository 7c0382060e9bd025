"""Which task may take what: the tasks and their ready queues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bus.errors import BusError
from bus.index.queues import ReadyQueue
from bus.index.state import Group, Row, State
from bus.records import TEACHER_TASK, LeaseRequest, VerdictKind
from relax.types import Purpose

Level = Literal["prompt", "row", "group"]


@dataclass(frozen=True, slots=True)
class Task:
    """level: what one item of a lease is: a group to generate, a row, or a complete group."""

    name: str
    level: Level
    purposes: frozenset[Purpose]
    after_verdict: bool = False
    teacher: str | None = None
    """Only rows whose tag `teacher` is this name."""


TASKS = {
    task.name: task
    for task in (
        Task("rollout", "prompt", frozenset(Purpose)),
        Task("reward", "row", frozenset(Purpose)),
        Task("ref", "row", frozenset({Purpose.TRAIN}), after_verdict=True),
        Task("actor", "group", frozenset({Purpose.TRAIN}), after_verdict=True),
    )
}


def task_named(name: str) -> Task:
    if name.startswith(TEACHER_TASK):
        teacher = name.removeprefix(TEACHER_TASK)
        return Task(name, "row", frozenset({Purpose.TRAIN}), after_verdict=True, teacher=teacher)
    if name not in TASKS:
        raise BusError(f"unknown task {name!r}; known: {', '.join(TASKS)}, {TEACHER_TASK}<name>")
    return TASKS[name]


class RowQueue:
    """Rows ready for one row-level task."""

    def __init__(self, state: State, task: Task, fields: frozenset[str], produces: frozenset[str]) -> None:
        self._s = state
        self._task = task
        self.fields = fields
        self.produces = produces
        self.ready: ReadyQueue[Row] = ReadyQueue(self._key, lambda row: row.row_id, self.wants)

    def _key(self, row: Row) -> tuple[int, int, int, int]:
        return (*self._s.groups[row.group_id].order, row.k, row.segment)

    def wants(self, row: Row) -> bool:
        group = self._s.groups.get(row.group_id)
        if group is None or group.fate is not None or group.purpose not in self._task.purposes:
            return False
        accepted = group.verdict is VerdictKind.ACCEPTED or group.spec.accept_rows
        if self._task.after_verdict and not accepted:
            return False
        if self._task.teacher is not None and row.tags.get("teacher") != self._task.teacher:
            return False
        name = self._task.name
        if name in row.done or name in row.leases or group.members[row.k].tombstone is not None:
            return False
        if self.produces and self.produces <= row.fields.keys():
            return False
        return row.visible and self.fields <= row.fields.keys()


class TaskQueues:
    """All ready queues. Row and group queues start at a task's first lease, which names the fields."""

    def __init__(self, state: State) -> None:
        self._s = state
        self.rows: dict[str, RowQueue] = {}
        self.prompts = {
            purpose: ReadyQueue[Group](lambda g: g.order, lambda g: g.spec.group_id, self._to_generate)
            for purpose in Purpose
        }
        self.groups: ReadyQueue[Group] | None = None
        self.group_fields: frozenset[str] = frozenset()

    def _to_generate(self, group: Group) -> bool:
        return group.fate is None and group.rollout.lease_id is None and group.missing

    def _to_train(self, group: Group) -> bool:
        if group.fate is not None or not group.is_train or group.verdict is not VerdictKind.ACCEPTED:
            return False
        if group.actor.lease_id is not None or not any(m.tombstone is None for m in group.members):
            return False
        return all(m.tombstone is not None or m.has(self.group_fields) for m in group.members)

    def open(self, request: LeaseRequest) -> None:
        """Make sure the queue of this request exists. Scans once when the wanted fields are new."""
        task = task_named(request.task)
        fields = frozenset(request.fields) - {"prompt"}
        if task.level == "row":
            old = self.rows.get(task.name)
            if old is None or old.fields != fields or old.produces != frozenset(request.produces):
                self.rows[task.name] = RowQueue(self._s, task, fields, frozenset(request.produces))
                for row in list(self._s.rows.values()):
                    if row.k >= 0:
                        self.rows[task.name].ready.offer(row)
        elif task.level == "group" and (self.groups is None or fields != self.group_fields):
            self.group_fields = fields
            self.groups = ReadyQueue[Group](lambda g: g.train_order, lambda g: g.spec.group_id, self._to_train)
            for group in self._s.groups.values():
                self.groups.offer(group)

    def offer_group(self, group: Group) -> None:
        """Offer the group and all its rows, after a change of the group as a whole."""
        if self.prompts[group.purpose].offer(group):
            self._s.woken.add("rollout")
        for row in group.sample_rows():
            self.offer_row(row)
        self.offer_to_train(group)

    def offer_row(self, row: Row) -> None:
        for name, queue in self.rows.items():
            if queue.ready.offer(row):
                self._s.woken.add(name)

    def offer_to_train(self, group: Group) -> None:
        if self.groups is not None and self.groups.offer(group):
            self._s.woken.add("actor")

    def sizes(self) -> dict[str, int]:
        """Queue lengths. Upper bounds: entries that ceased to be eligible leave at the head."""
        sizes = {"rollout": sum(len(queue) for queue in self.prompts.values())}
        sizes |= {name: len(queue.ready) for name, queue in self.rows.items()}
        if self.groups is not None:
            sizes["actor"] = len(self.groups)
        return sizes

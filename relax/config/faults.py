"""Fault points: where in the code of a run a process may be made to fail, and how."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import Field, model_validator

from relax.config.base import StrictModel


class Point(enum.StrEnum):
    """A named place that a process passes."""

    MID_PUT = "mid_put"
    """The bytes of a put lie in the storage; nothing of it is visible yet."""
    AFTER_LEASE = "after_lease"
    """A lease was given; nothing was done with it."""
    BEFORE_ACK = "before_ack"
    """The work of a lease is in the bus (of the manager: verdicts are given); that it is done is told to nobody."""
    MID_PUBLISH = "mid_publish"
    """Actor: a version is staged, and not handed to DCS."""
    DCS_MID_PUBLISH = "dcs_mid_publish"
    """DCS: a version is visible in its folder; neither the actor nor an instance was told."""
    MID_SAVE = "mid_save"
    """DCS: the files of a checkpoint are copied; its manifest is missing."""
    AFTER_SNAPSHOT = "after_snapshot"
    """Actor: the step is taken, and not published."""
    BEFORE_COMMIT = "before_commit"
    """Actor: the version is published, and its step not committed in the bus."""
    EPOCH_BORDER = "epoch_border"
    """Manager: the first group of another epoch is in the ledger, and its prompt not in the bus."""
    MID_ADOPT = "mid_adopt"
    """Instance: the engine holds new weights; the instance still counts as one of the version before."""


class FaultAction(enum.StrEnum):
    """What happens to the process that passes."""

    KILL = "kill"
    """SIGKILL."""
    HANG = "hang"
    """SIGSTOP: all its threads stand still until somebody sends SIGCONT or kills it."""
    EXIT = "exit"
    """The interpreter ends at once, with code 70 and without any clean-up."""
    RAISE = "raise"
    """`FaultInjected` is raised."""
    NO_SPACE = "no_space"
    """The error of a full disk is raised."""


MANAGER, INSTANCE, ACTOR, DCS = "rollout", "instance", "actor", "dcs"

ROLES_AT: dict[Point, tuple[str, ...]] = {
    Point.MID_PUT: (MANAGER, INSTANCE, "reward", "ref", "teacher"),
    Point.AFTER_LEASE: (INSTANCE, "reward", "ref", "teacher", ACTOR),
    Point.BEFORE_ACK: (MANAGER, INSTANCE, "reward", "ref", "teacher"),
    Point.MID_PUBLISH: (ACTOR,),
    Point.DCS_MID_PUBLISH: (DCS,),
    Point.MID_SAVE: (DCS,),
    Point.AFTER_SNAPSHOT: (ACTOR,),
    Point.BEFORE_COMMIT: (ACTOR,),
    Point.EPOCH_BORDER: (MANAGER,),
    Point.MID_ADOPT: (INSTANCE,),
}
"""Which roles pass a point; `instance` stands for each rollout instance."""


class FaultPoint(StrictModel):
    """One fault of one process, once in the life of a run folder."""

    point: Point
    """Where."""
    role: str
    """Whose process: `actor`, `ref`, `reward`, `dcs`, `rollout` (the manager), `instance` (whichever is first), or one
    replica by name, as `rollout-0`."""
    action: FaultAction = FaultAction.KILL
    """What happens to it."""
    at: Annotated[int, Field(ge=1)] | None = 1
    """At its n-th passage since the process began. null: at the first one after `relax chaos` has armed the fault."""

    @model_validator(mode="after")
    def _role_passes_there(self) -> FaultPoint:
        roles = ROLES_AT[self.point]
        replica = self.role.startswith(("rollout-", "teacher-"))
        kind = {"rollout": INSTANCE, "teacher": "teacher"}[self.role.split("-")[0]] if replica else self.role
        if kind not in roles:
            raise ValueError(f"'{self.role}' does not pass the point '{self.point}'; who does: {', '.join(roles)}")
        return self

    @property
    def name(self) -> str:
        """Of its files in the run folder."""
        return f"{self.point}-{self.role}-{self.action}-{self.at or 'armed'}"

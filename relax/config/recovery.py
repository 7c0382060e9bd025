"""The section `controller.recovery`: when a role counts as lost or stuck, and what is done about it how often."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax.config.base import StrictModel

Seconds = Annotated[float, Field(gt=0)]


class RoleDeadlines(StrictModel):
    """Of one role; an unset one is derived."""

    silence_s: Seconds | None = None
    """Without a heartbeat for this long the replica is killed and replaced; unset: `recovery.silence_s`."""
    progress_s: Seconds | None = None
    """With work and no moving counter for this long it counts as hung; unset: from its measured times."""


class RecoveryConfig(StrictModel):
    """Detection and recovery. Local answers come first, then the global one, then the run fails with a report."""

    enabled: bool = True
    """Off: faults are only reported, and Serve alone restarts what it sees dead."""
    silence_s: Seconds = 20.0
    """Without a heartbeat for this long a replica is killed, so that Serve replaces it."""
    progress_floor_s: Seconds = 60.0
    """A derived deadline for progress is at least this."""
    progress_factor: Annotated[float, Field(gt=1)] = 10.0
    """A derived deadline is this times the median time between two moves of the role's counters."""
    start_s: Seconds = 180.0
    """A replaced replica has to be back within this; also the deadline for progress until times are measured."""
    deadlines: dict[str, RoleDeadlines] = Field(default_factory=dict)
    """By role: actor, ref, teacher, rollout, reward, dcs, instance or evaluator."""
    budget: Annotated[int, Field(ge=1)] = 5
    """Local recoveries of one replica within the window, before the global one."""
    global_budget: Annotated[int, Field(ge=0)] = 2
    """Global recoveries within the window, before the run fails."""
    bus_budget: Annotated[int, Field(ge=0)] = 10
    """Renewals of the bus within the window, before a global recovery."""
    window_s: Seconds = 600.0
    """Recoveries older than this are forgotten."""
    forgive_after_s: Seconds = 30.0
    """A recovered replica that lives for this long and works has its budget back."""
    backoff_s: Seconds = 2.0
    """Wait before the second recovery of one replica within the window; it doubles with each further one."""
    backoff_max_s: Seconds = 60.0
    """The longest such wait."""
    slow_factor: Annotated[float, Field(gt=1)] = 4.0
    """A role is told as slow while its counters take this times their median to move."""
    straggler_factor: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """An instance with less than this part of its peers' median tokens/s per running request is a straggler."""
    straggler_window_s: Seconds = 60.0
    """For how long it must be so."""
    replace_stragglers: bool = False
    """Take stragglers away and make other instances in their place; else they are only reported (B18)."""
    state_path: str = ""
    """File of the controller's own state; empty: controller.sqlite in the run folder."""

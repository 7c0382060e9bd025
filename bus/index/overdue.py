"""The overdue rule of the trainer's lease: old groups keep their place in the step."""

from __future__ import annotations

from collections.abc import Mapping


def held_slots(waiting: Mapping[int, int], min_version: int, hold: int | None, groups_per_step: int) -> int:
    """Slots of the present step that a group of `min_version` must leave to older ones.

    The trainer takes it only if more slots than that are left. waiting: groups neither taken by the trainer
    nor terminal, by their `min_version`. hold: those at or below it are due in this step, those above it one
    step later for each version, and a step trains `groups_per_step`. At a staleness of 2 and more it does not
    suffice to look at `hold` alone: when young groups take this step, more old ones than one step can train
    may become due together.
    """
    if hold is None:
        return 0
    older = held = 0
    for version in sorted(waiting):
        if version >= min_version:
            break
        older += waiting[version]
        held = max(held, older - max(0, version - hold) * groups_per_step)
    return held

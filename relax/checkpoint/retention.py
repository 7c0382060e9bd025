"""Which checkpoints stay on disk. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relax.config.roles import RetentionConfig


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint. `serial` orders the saves; `metrics`: the record of its step."""

    serial: int
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def kept(saved: Sequence[Saved], policy: RetentionConfig) -> set[int]:
    """The serials that stay: of the newest, of the best by a metric, of one in every so many steps. The last one that
    was saved is always among them. Of two saves of one step, as after a rollback, only the later one is `best` or
    one of `every`."""
    in_order = sorted(saved, key=lambda one: one.serial)
    stay = {one.serial for one in in_order[-policy.newest :]}
    of_steps = list({one.step: one for one in in_order}.values())
    if policy.best:
        sign = 1 if policy.best_is == "highest" else -1
        measured = [one for one in of_steps if math.isfinite(one.metrics.get(policy.best_by, math.nan))]
        measured.sort(key=lambda one: (sign * one.metrics[policy.best_by], one.serial))
        stay |= {one.serial for one in measured[-policy.best :]}
    if policy.every:
        stay |= {one.serial for one in of_steps if one.step % policy.every == 0}
    return stay

"""Which steps of a run are recorded, and what of them."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import field_validator

from relax.config.base import StrictModel

Border = Literal["rollout", "reward", "ref", "advantage", "loss", "weights"]
BORDERS: tuple[Border, ...] = ("rollout", "reward", "ref", "advantage", "loss", "weights")

_PART = re.compile(r"(?P<first>\d+)(?P<dash>-(?P<last>\d+)?)?(?:/(?P<every>\d+))?")


class DumpConfig(StrictModel):
    """Records chosen steps at the service borders, to look at them and compute them again (docs/debugging.md)."""

    steps: str = ""
    """Steps to record, as numbers and ranges: `3`, `1-3,10`, `100-`, `1-/50` (every 50th from 1). Empty is off."""
    at: tuple[Border, ...] = BORDERS
    """Borders: what rollout, reward and ref wrote, advantages with what they came from, losses and log-probs of the
    update, and the weights before it with the optimizer's state (16 bytes a parameter). A replay needs rollout and
    weights."""

    @field_validator("steps", mode="before")
    @classmethod
    def _number_or_list(cls, value: Any) -> Any:
        """YAML reads `3` as a number, and a list is what some write for several."""
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return ",".join(str(part) for part in value) if isinstance(value, list | tuple) else value

    @field_validator("steps")
    @classmethod
    def _well_formed(cls, value: str) -> str:
        step_ranges(value)
        return value

    def wants(self, step: int) -> bool:
        """Whether committed step number `step` (from 1) is recorded."""
        return selects(self.steps, step)


def step_ranges(text: str) -> list[tuple[int, int | None, int]]:
    """(first, last or None for no end, every) of each part. Raises `ValueError` that names the part."""
    ranges = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError(f"steps '{part}': expected a number or a range, e.g. 3, 1-3, 100- or 1-/50")
        first, every = int(found["first"]), int(found["every"] or 1)
        last = first if found["dash"] is None else int(found["last"]) if found["last"] else None
        if first < 1 or every < 1 or (last is not None and last < first):
            raise ValueError(f"steps '{part}': steps count from 1, and a range goes upwards")
        ranges.append((first, last, every))
    return ranges


def selects(text: str, step: int) -> bool:
    """Whether `step` is among the steps that `text` names."""
    return any(
        first <= step and (last is None or step <= last) and (step - first) % every == 0
        for first, last, every in step_ranges(text)
    )

"""What a dump of one step holds. Plain values: no files, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from relax.config.dump import Border
from relax.types import Json, RelaxError

Array = npt.NDArray[Any]


class DumpError(RelaxError, ValueError):
    """A dump that cannot be read, replayed or compared: says which file or field, and why."""


@dataclass(frozen=True, slots=True)
class Field:
    """One thing that a row has. `kind`: `tokens` is an array [T] or [T, K], `number` one float32, `json` anything."""

    name: str
    border: Border
    kind: str = "tokens"
    computed: bool = False
    """By the trainer in the step itself: a replay computes it again."""


FIELDS: tuple[Field, ...] = (
    Field("prompt", "rollout", "json"),
    Field("prompt_text", "rollout", "json"),
    Field("tokens", "rollout"),
    Field("loss_mask", "rollout"),
    Field("sampling", "rollout", "json"),
    Field("finish_reason", "rollout", "json"),
    Field("response_text", "rollout", "json"),
    Field("metadata", "rollout", "json"),
    Field("versions", "rollout"),
    Field("rollout_logprobs", "rollout"),
    Field("reward_state", "reward", "json"),
    Field("reward_parts", "reward", "json"),
    Field("reward", "reward", "number"),
    Field("accuracy", "reward", "number"),
    Field("ref_logprobs", "ref"),
    Field("teacher_logprobs", "ref"),
    Field("teacher_topk_ids", "ref"),
    Field("teacher_topk_logprobs", "ref"),
    Field("proximal_logprobs", "advantage", computed=True),
    Field("values", "advantage", computed=True),
    Field("advantages", "advantage", computed=True),
    Field("returns", "advantage", computed=True),
    Field("token_weights", "advantage", computed=True),
    Field("trainer_logprobs", "loss", computed=True),
    Field("entropy", "loss", computed=True),
    Field("loss_terms", "loss", computed=True),
)
"""In the order of the pipeline."""

BY_NAME: Mapping[str, Field] = {f.name: f for f in FIELDS}


@dataclass(frozen=True, slots=True, eq=False)
class RowDump:
    """One training row. `portion`: which of the actor's leases brought it; rows of one portion are batched together.

    values: field name -> array [T] or [T, K] of any row field, a float, or JSON. Absent: not recorded.
    """

    row_id: str
    portion: int
    values: Mapping[str, Any]

    def array(self, name: str) -> Array:
        """Raises `DumpError` where it was not recorded."""
        value = self.values.get(name)
        if not isinstance(value, np.ndarray):
            raise DumpError(f"row {self.row_id}: '{name}' was not recorded")
        return value


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update. who: `policy` or `critic`; numbers: loss, grad_norm, lr, n_tokens, n_rows and stats."""

    who: str
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class StepDump:
    """`step`: its number once committed, from 1; `version`: of the policy that was trained in it.

    `result`: loss, grad_norm, lr and statistics of the step, as in metrics.jsonl. `digests`: weights_before and
    weights_after. `config`: every resolved section of the run. `code`: what it was made by (`provenance`).
    """

    step: int
    version: int
    rows: Mapping[str, RowDump]
    updates: tuple[Update, ...] = ()
    result: Mapping[str, float] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Json] = field(default_factory=dict)
    code: Mapping[str, Json] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether some row has the field."""
        return any(name in row.values for row in self.rows.values())

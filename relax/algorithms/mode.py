"""Whether a row's log-probs mean what the trainer computes."""

from __future__ import annotations

import math
from collections.abc import Iterable

from relax.types import LogprobMode, RelaxError, SamplingParams


class ModeMismatch(RelaxError, ValueError):
    """A row was sampled in a mode that the trainer cannot reproduce; names the row and the setting (B7)."""


def check_batch_mode(rows: Iterable[tuple[str, SamplingParams]]) -> None:
    """Refuse (row id, sampling record) pairs unless the trainer's log-probs are comparable.

    The trainer computes log_softmax(logits / temperature) over the whole vocabulary. Top-p, top-k or a
    log-prob mode other than `temperature` mean another distribution, and greedy sampling has none.
    Raises `ModeMismatch` at the first such row.
    """
    for row_id, sampling in rows:
        fault = _fault(sampling)
        if fault is not None:
            raise ModeMismatch(f"row {row_id} cannot be trained: {fault}")


def _fault(sampling: SamplingParams) -> str | None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature > 0):
        return f"temperature {sampling.temperature}, training needs one above 0"
    if sampling.top_p != 1.0:
        return f"top_p {sampling.top_p}, training needs 1.0"
    if sampling.top_k != -1:
        return f"top_k {sampling.top_k}, training needs -1 (off)"
    if sampling.logprob_mode is not LogprobMode.TEMPERATURE:
        return f"logprob_mode '{sampling.logprob_mode}', training needs '{LogprobMode.TEMPERATURE}'"
    return None

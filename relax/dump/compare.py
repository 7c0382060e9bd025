"""Two records of one step, field by field in the order of the pipeline. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax.dump.record import FIELDS, Array, Field, RowDump, StepDump

WEIGHTS_BEFORE, WEIGHTS_AFTER = "weights_before", "weights_after"
ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Place:
    """Where two values differ. position: index of the token, None for what a row or a step has once; gap: |a - b|,
    infinite where one is no number."""

    row_id: str | None
    position: int | None
    left: Any
    right: Any
    gap: float

    def __str__(self) -> str:
        row = "" if self.row_id is None else f"row {self.row_id}, "
        where = "" if self.position is None else f"position {self.position}, "
        gap = f" (gap {self.gap:.3g})" if math.isfinite(self.gap) else ""
        return f"{row}{where}{_show(self.left)} against {_show(self.right)}{gap}"


@dataclass(frozen=True, slots=True)
class Compared:
    """One field of one step. left, right: means of numbers, None of anything else. `differing` of `total` values lie
    further apart than the tolerance; `first` is the first of them by row and position. largest: |a - b| of all."""

    field: str
    left: float | None
    right: float | None
    total: int
    differing: int
    largest: float
    first: Place | None

    @property
    def equal(self) -> bool:
        return self.differing == 0


def compare_steps(left: StepDump, right: StepDump, tolerance: float) -> list[Compared]:
    """Fields that both recorded, rows aligned by their ids. A value differs beyond tolerance x max(1, |left|)."""
    out = [_rows(left, right)]
    common = [row_id for row_id in sorted(left.rows) if row_id in right.rows]
    pairs = [(left.rows[row_id], right.rows[row_id]) for row_id in common]
    for spec in FIELDS:
        if spec.name == "trainer_logprobs":
            out += _digest(left, right, WEIGHTS_BEFORE)
        if left.has(spec.name) and right.has(spec.name):
            out.append(compare_field(spec, pairs, tolerance))
    if left.result and right.result:
        out += compare_results(left.result, right.result, tolerance)
    return [*out, *_digest(left, right, WEIGHTS_AFTER)]


def compare_results(left: Mapping[str, float], right: Mapping[str, float], tolerance: float) -> list[Compared]:
    """Loss, then statistics, then the gradient norm: each once per step."""
    names = dict.fromkeys([*left, *right])
    ordered = sorted(names, key=lambda name: {"loss": 0, "grad_norm": 2, "lr": 3}.get(name, 1))
    return [_once(name, left.get(name, ABSENT), right.get(name, ABSENT), tolerance) for name in ordered]


def compare_field(spec: Field, pairs: Iterable[tuple[RowDump, RowDump]], tolerance: float) -> Compared:
    """One field over rows that both sides have."""
    total = differing = 0
    largest = 0.0
    first: Place | None = None
    means: tuple[list[float], list[float]] = ([], [])
    for left, right in pairs:
        a, b = left.values.get(spec.name, ABSENT), right.values.get(spec.name, ABSENT)
        places, count, widest = _row_places(left.row_id, a, b, tolerance)
        total, differing = total + count, differing + len(places)
        largest = max(largest, widest)
        first = first or (places[0] if places else None)
        for side, value in zip(means, (a, b), strict=True):
            side += _numbers(value, left)
    return Compared(spec.name, _mean(means[0]), _mean(means[1]), total, differing, largest, first)


def _row_places(row_id: str, a: Any, b: Any, tolerance: float) -> tuple[list[Place], int, float]:
    """(where they differ, values compared, largest gap)."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _array_places(row_id, a, b, tolerance)
    gap = _gap(a, b)
    if _beyond(a, gap, tolerance):
        return [Place(row_id, None, a, b, gap)], 1, gap
    return [], 1, gap


def _array_places(row_id: str, a: Array, b: Array, tolerance: float) -> tuple[list[Place], int, float]:
    length = min(len(a), len(b))
    left, right = a[:length].astype(np.float64), b[:length].astype(np.float64)
    both = np.isnan(left) & np.isnan(right) | (left == right)
    gaps = np.where(both, 0.0, np.nan_to_num(np.abs(left - right), nan=math.inf))
    off = gaps > tolerance * np.maximum(1.0, np.nan_to_num(np.abs(left), nan=1.0))
    places = [
        Place(row_id, int(index[0]), a[tuple(index)].item(), b[tuple(index)].item(), float(gaps[tuple(index)]))
        for index in np.argwhere(off)
    ]
    if len(a) != len(b):
        ends = [side[length].tolist() if len(side) > length else ABSENT for side in (a, b)]
        places.append(Place(row_id, length, ends[0], ends[1], math.inf))
    return places, max(len(a), len(b)), float(gaps.max(initial=0.0))


def _once(name: str, a: Any, b: Any, tolerance: float) -> Compared:
    gap = _gap(a, b)
    differs = _beyond(a, gap, tolerance)
    left, right = (float(v) if isinstance(v, int | float) else None for v in (a, b))
    return Compared(name, left, right, 1, int(differs), gap, Place(None, None, a, b, gap) if differs else None)


def _digest(left: StepDump, right: StepDump, name: str) -> list[Compared]:
    if name in left.digests and name in right.digests:
        return [_once(name, left.digests[name], right.digests[name], 0.0)]
    return []


def _rows(left: StepDump, right: StepDump) -> Compared:
    missing = [Place(row_id, None, "present", ABSENT, math.inf) for row_id in left.rows if row_id not in right.rows]
    missing += [Place(row_id, None, ABSENT, "present", math.inf) for row_id in right.rows if row_id not in left.rows]
    missing.sort(key=lambda place: place.row_id or "")
    total = len({*left.rows, *right.rows})
    return Compared("rows", None, None, total, len(missing), 0.0, missing[0] if missing else None)


def _gap(a: Any, b: Any) -> float:
    if _is_number(a) and _is_number(b):
        if a == b or (math.isnan(a) and math.isnan(b)):
            return 0.0
        gap = abs(float(a) - float(b))
        return math.inf if math.isnan(gap) else gap
    return 0.0 if a == b else math.inf


def _beyond(a: Any, gap: float, tolerance: float) -> bool:
    scale = abs(float(a)) if _is_number(a) and math.isfinite(a) else 1.0
    return gap > tolerance * max(1.0, scale)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any, row: RowDump) -> Sequence[float]:
    if isinstance(value, np.ndarray):
        mask = row.values.get("loss_mask")
        inside = isinstance(mask, np.ndarray) and value.dtype.kind == "f" and len(mask) == len(value)
        return list(value[mask].ravel() if inside else value.ravel())
    return [float(value)] if _is_number(value) else []


def _mean(numbers: Sequence[float]) -> float | None:
    return float(np.mean(numbers)) if len(numbers) else None


def _show(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."

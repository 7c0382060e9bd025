"""Where two runs part: by their dumps, and by metrics.jsonl where there are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.dump.compare import Compared, compare_results, compare_steps
from relax.dump.files import find_dumps, read_dump
from relax.dump.record import DumpError
from relax.telemetry.metrics import METRICS
from relax.telemetry.run_folder import RunFolder
from relax.types import Json

METRICS_FILE = "metrics.jsonl"

_FIRST = (
    "groups_trained", "response_tokens_mean", "version_lag_max", "version_lag_mean", "reward_mean", "reward_std",
    "accuracy_mean", "zero_variance_groups", "loss", "grad_norm", "lr",
)  # fmt: skip
_OF_TIME = frozenset(
    {"trainer_utilisation", "bus_rows", "bus_bytes", "produced", "trained", "dropped", "queued", "groups_filtered",
     "groups_dropped", "reward_calls", "reward_failures", "reward_retries", "reward_worker_restarts"}
)  # fmt: skip
"""Metrics that depend on when they were read: two equal runs differ in them."""


@dataclass(frozen=True, slots=True)
class Parted:
    """What was compared and where it first differs. `source`: dumps or metrics.jsonl. `fields`: of the step `step`, in
    the order of the pipeline; of the last step where nothing differs. `settings`: configuration that differs."""

    source: str
    steps: tuple[int, ...]
    step: int
    fields: tuple[Compared, ...]
    settings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Compared | None:
        return next((field for field in self.fields if not field.equal), None)


def diff(left: Path, right: Path, tolerance: float) -> Parted:
    """Each a run folder, its `dumps` folder, or one dump.

    Raises `DumpError` for folders with nothing to compare, `RunFolderError` for a broken metrics.jsonl.
    """
    for place in (left, right):
        if not place.is_dir():
            raise DumpError(f"{place} is no folder: give two run folders or two dumps")
    dumps = find_dumps(left), find_dumps(right)
    metrics = (left / METRICS_FILE).is_file() and (right / METRICS_FILE).is_file()
    if dumps[0] and dumps[1]:
        found = _by_dumps(dumps[0], dumps[1], tolerance)
        return _with_earlier_metrics(found, left, right, tolerance) if metrics else found
    if metrics:
        return _by_metrics(left, right, tolerance)
    lacking = [str(place) for place, has in zip((left, right), dumps, strict=True) if not has]
    raise DumpError(
        f"nothing to compare: no dumps in {' and '.join(lacking)}, and not both have {METRICS_FILE}: "
        "record some with `relax dump FILE --steps 1-3`"
    )


def _by_dumps(left: Mapping[int, Path], right: Mapping[int, Path], tolerance: float) -> Parted:
    steps = tuple(step for step in left if step in right)
    if not steps:
        raise DumpError(f"no step was recorded on both sides: {_listed(left)} and {_listed(right)}")
    only = [f"step {step} was recorded on one side only" for step in sorted(set(left) ^ set(right))]
    settings: tuple[str, ...] = ()
    fields: list[Compared] = []
    for step in steps:
        a, b = read_dump(left[step]), read_dump(right[step])
        settings = tuple(differing_settings(a.config, b.config))
        fields = compare_steps(a, b, tolerance)
        if not all(field.equal for field in fields):
            break
    return Parted("dumps", steps, step, tuple(fields), settings, tuple(only))


def _by_metrics(left: Path, right: Path, tolerance: float) -> Parted:
    sides = [{int(line["step"]): line for line in RunFolder(place).read_metrics()} for place in (left, right)]
    steps = tuple(step for step in sides[0] if step in sides[1])
    if not steps:
        raise DumpError(f"{left} and {right} have no step in common in {METRICS_FILE}")
    fields: list[Compared] = []
    for step in steps:
        fields = compare_results(_comparable(sides[0][step]), _comparable(sides[1][step]), tolerance)
        fields.sort(key=lambda field: _FIRST.index(field.field) if field.field in _FIRST else len(_FIRST))
        if not all(field.equal for field in fields):
            break
    only = sorted(set(sides[0]) ^ set(sides[1]))
    notes = [f"{len(only)} steps, from {only[0]}, are on one side only"] if only else []
    configs = [RunFolder(place) for place in (left, right)]
    settings: list[str] = []
    if all(folder.config_path.exists() for folder in configs):
        settings = differing_settings(configs[0].read_config(), configs[1].read_config())
    return Parted(METRICS_FILE, steps, step, tuple(fields), tuple(settings), tuple(notes))


def _with_earlier_metrics(found: Parted, left: Path, right: Path, tolerance: float) -> Parted:
    """Metrics are there for every step, so they may tell of one before the first dump."""
    metrics = _by_metrics(left, right, tolerance)
    if metrics.first is None or (found.first is not None and metrics.step >= found.step):
        return found
    note = f"{METRICS_FILE} differs in step {metrics.step} already: {metrics.first.field}, {metrics.first.first}"
    if found.first is None:
        return metrics
    return Parted(found.source, found.steps, found.step, found.fields, found.settings, (*found.notes, note))


def _comparable(record: Mapping[str, float]) -> dict[str, float]:
    def timed(name: str) -> bool:
        return name in _OF_TIME or (name in METRICS and METRICS[name].unit in ("s", "tokens/s"))

    return {name: value for name, value in record.items() if not timed(name) and name != "step"}


def differing_settings(left: Mapping[str, Json], right: Mapping[str, Json]) -> list[str]:
    """`section.key: a / b` of what is not the same, where a run lies and what it is called apart."""
    a, b = dict(_leaves(left, "")), dict(_leaves(right, ""))
    skipped = ("run.run_dir", "run.name")
    return [
        f"{key}: {a.get(key, 'absent')} / {b.get(key, 'absent')}"
        for key in dict.fromkeys([*a, *b])
        if a.get(key) != b.get(key) and key not in skipped and not key.startswith("actor.dump.")
    ]


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Json]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def _listed(dumps: Mapping[int, Path] | Sequence[int]) -> str:
    return "steps " + ", ".join(str(step) for step in dumps)

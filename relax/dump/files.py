"""A dump as files: `step-00000012/` with dump.json, rows.safetensors, and the models before the step.

    dump.json           ids, texts, settings, versions, results, and a digest of every other file
    rows.safetensors    one tensor per field, the rows of it one after another; `lengths` int64 [rows]
    model/              the policy before the step as a Hugging Face folder
    state/, critic/     the same with optimizer and schedule, as a checkpoint holds it; the critic's

A dump becomes visible by one rename, whole.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from relax.dump.record import BY_NAME, FIELDS, Array, DumpError, RowDump, StepDump, Update
from relax.types import Json

SCHEMA = 1
DUMPS = "dumps"
MANIFEST, ROWS = "dump.json", "rows.safetensors"
MODEL, STATE, CRITIC = "model", "state", "critic"
_NAME = re.compile(r"step-(\d{8,})")
_CHUNK_BYTES = 1 << 22


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")
    row_id: str
    portion: int
    facts: dict[str, Any]


class _Update(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")
    who: str
    numbers: dict[str, float]


class _Manifest(BaseModel):
    """dump.json. `fields`: field -> indices of the rows that have it, null for all."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")
    schema_version: int
    step: int
    version: int
    rows: list[_Row]
    fields: dict[str, list[int] | None]
    updates: list[_Update]
    result: dict[str, float]
    digests: dict[str, str]
    config: dict[str, Any]
    code: dict[str, Any]
    files: dict[str, str]


def step_folder(dumps: Path, step: int) -> Path:
    return dumps / f"step-{step:08d}"


def staging_folder(dumps: Path, step: int) -> Path:
    """An empty folder that `publish` makes the dump of `step`; what an interrupted attempt left is gone."""
    staging = dumps / f".step-{step:08d}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def publish(dump: StepDump, staging: Path, dumps: Path) -> Path:
    """Write the rows beside the models that are in `staging` already, and make all visible at once."""
    write_dump(dump, staging)
    final = step_folder(dumps, dump.step)
    if final.exists():  # of an attempt before a restart: the step was trained anew
        shutil.rmtree(final)
    staging.rename(final)
    return final


def write_dump(dump: StepDump, folder: Path) -> None:
    """Into `folder`, which may hold models; each file gets a digest. A full disk is a `DumpError` or an `OSError`."""
    rows = list(dump.rows.values())
    tensors: dict[str, Array] = {}
    present: dict[str, list[int] | None] = {}
    for spec in FIELDS:
        having = [index for index, row in enumerate(rows) if spec.name in row.values]
        if not having:
            continue
        present[spec.name] = None if len(having) == len(rows) else having
        if spec.kind == "tokens":
            tensors[spec.name] = np.ascontiguousarray(np.concatenate([rows[i].values[spec.name] for i in having]))
        elif spec.kind == "number":
            tensors[spec.name] = np.array([rows[i].values[spec.name] for i in having], np.float32)
    if tensors:
        tensors["lengths"] = np.array([_length(row) for row in rows], np.int64)
    try:
        save_file(tensors, folder / ROWS)
    except SafetensorError as error:
        raise DumpError(f"{folder / ROWS} cannot be written: {error}") from error
    manifest = _Manifest(
        schema_version=SCHEMA,
        step=dump.step,
        version=dump.version,
        rows=[_Row(row_id=row.row_id, portion=row.portion, facts=_facts(row)) for row in rows],
        fields=present,
        updates=[_Update(who=update.who, numbers=dict(update.numbers)) for update in dump.updates],
        result=dict(dump.result),
        digests=dict(dump.digests),
        config=dict(dump.config),
        code=dict(dump.code),
        files={name: _digest(folder / name) for name in sorted(_payload(folder))},
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_dump(folder: Path) -> StepDump:
    """Raises `DumpError` for a folder that is no dump, of another schema version, with missing or damaged files."""
    manifest = _read_manifest(folder)
    for name, digest in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DumpError(f"{path} is missing: the dump is incomplete, copy it again")
        if _digest(path) != digest:
            raise DumpError(f"{path} is damaged: its digest is not the one in {MANIFEST}; copy the dump again")
    try:
        tensors = load_file(folder / ROWS)
    except (OSError, SafetensorError) as error:
        raise DumpError(f"{folder / ROWS} cannot be read: {error}") from error
    values: list[dict[str, Any]] = [dict(row.facts) for row in manifest.rows]
    lengths = tensors.pop("lengths", np.zeros(len(values), np.int64))
    for name, array in tensors.items():
        _spread(folder, name, array, lengths, manifest.fields.get(name), values)
    rows = {
        row.row_id: RowDump(row.row_id, row.portion, found)
        for row, found in zip(manifest.rows, values, strict=True)
    }  # fmt: skip
    return StepDump(
        step=manifest.step,
        version=manifest.version,
        rows=rows,
        updates=tuple(Update(update.who, update.numbers) for update in manifest.updates),
        result=manifest.result,
        digests=manifest.digests,
        config=manifest.config,
        code=manifest.code,
    )


def find_dumps(place: Path) -> dict[int, Path]:
    """Step -> folder, ascending: of a run folder, of its `dumps` folder, or of one dump. Empty where there is none."""
    if (place / MANIFEST).is_file():
        return {_read_manifest(place).step: place}
    root = place / DUMPS if (place / DUMPS).is_dir() else place
    if not root.is_dir():
        return {}
    return dict(sorted((int(found[1]), path) for path in root.iterdir() if (found := _NAME.fullmatch(path.name))))


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / MANIFEST
    try:
        loaded: Json = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DumpError(f"{folder} is no dump: {MANIFEST} is missing") from error
    except (OSError, ValueError) as error:
        raise DumpError(f"{path} cannot be read: {error}") from error
    found = loaded.get("schema_version") if isinstance(loaded, dict) else None
    if found != SCHEMA:
        raise DumpError(
            f"{path}: schema version {found}, this build reads {SCHEMA}: use the release that wrote it (see 'code')"
        )
    try:
        return _Manifest.model_validate(loaded)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DumpError(f"{path}: {place}: {first['msg']}") from error


def _spread(
    folder: Path,
    name: str,
    array: Array,
    lengths: Array,
    present: Sequence[int] | None,
    values: Sequence[dict[str, Any]],
) -> None:
    """Give each row its part of a field's tensor."""
    spec = BY_NAME.get(name)
    having = list(range(len(values))) if present is None else present
    if spec is None or (having and max(having) >= len(values)):
        raise DumpError(f"{folder / ROWS}: unknown field '{name}', or rows that {MANIFEST} does not list")
    if spec.kind == "number":
        parts = list(array)
    else:
        parts = np.split(array, np.cumsum(lengths[having])[:-1])
    if len(parts) != len(having) or (spec.kind == "tokens" and len(array) != lengths[having].sum()):
        raise DumpError(f"{folder / ROWS}: field '{name}' does not fit the rows that {MANIFEST} lists")
    for index, part in zip(having, parts, strict=True):
        values[index][name] = float(part) if spec.kind == "number" else part


def _length(row: RowDump) -> int:
    return next((len(value) for name, value in row.values.items() if BY_NAME[name].kind == "tokens"), 0)


def _facts(row: RowDump) -> dict[str, Json]:
    return {name: value for name, value in row.values.items() if BY_NAME[name].kind == "json"}


def _payload(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and path.name != MANIFEST:
            yield path.relative_to(folder).as_posix()


def _digest(path: Path) -> str:
    whole = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            whole.update(chunk)
    return whole.hexdigest()


def describe(dump: StepDump) -> Mapping[str, tuple[str, str, int]]:
    """Field -> (dtype, shape, rows that have it), in the order of the pipeline; for people."""
    out: dict[str, tuple[str, str, int]] = {}
    for spec in FIELDS:
        found = [row.values[spec.name] for row in dump.rows.values() if spec.name in row.values]
        if not found:
            continue
        if spec.kind == "tokens":
            shape = "[T]" if found[0].ndim == 1 else f"[T, {found[0].shape[1]}]"
            out[spec.name] = (str(found[0].dtype), shape, len(found))
        else:
            out[spec.name] = ("float32" if spec.kind == "number" else "json", "-", len(found))
    return out

"""The declared schema of the bus and the checks at its border (B23).

T is the number of tokens of a row. Fields of one length group have the same first dimension.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import orjson

from bus.errors import SchemaError
from bus.records import PROMPTS, SAMPLES, Array, FieldValue, Scalar
from relax.types import NO_VERSION, Json


@dataclass(frozen=True, slots=True)
class Field:
    """rank: dimensions of an array field. dtype: NumPy names, any of which is accepted."""

    name: str
    kind: Literal["array", "json"]
    dtypes: tuple[str, ...] = ()
    rank: int = 0
    length_group: str | None = None
    topic: str = SAMPLES


def _per_token(name: str, dtype: str) -> Field:
    return Field(name, "array", (dtype,), 1, "T")


SCHEMA: Mapping[str, Field] = {
    f.name: f
    for f in (
        Field("prompt", "json", topic=PROMPTS),
        _per_token("tokens", "int32"),
        _per_token("loss_mask", "bool"),
        _per_token("rollout_logprobs", "float32"),
        _per_token("versions", "int32"),
        Field("sampling", "json"),
        Field("finish_reason", "json"),
        Field("metadata", "json"),
        Field("reward", "array", ("float32",)),
        Field("accuracy", "array", ("float32",)),
        Field("reward_parts", "json"),
        Field("reward_state", "json"),
        _per_token("ref_logprobs", "float32"),
        _per_token("proximal_logprobs", "float32"),
        _per_token("values", "float32"),
        _per_token("teacher_logprobs", "float32"),
        Field("teacher_topk_ids", "array", ("int32",), 2, "T"),
        Field("teacher_topk_logprobs", "array", ("float32",), 2, "T"),
        # One row per predicted token, hence T-1: outside the length group.
        Field("routed_experts", "array", ("uint8", "int16"), 3),
    )
}

_PREFIXED: Mapping[str, Field] = {
    "media.": Field("media.*", "json"),
}

TOKEN_FIELDS = (
    "tokens", "loss_mask", "rollout_logprobs", "versions", "ref_logprobs", "proximal_logprobs", "values",
    "teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs",
)  # fmt: skip
"""What one row carries at most: the worst case that is reserved."""

JSON_BYTES = 4096
"""Room per row for JSON fields, scalars and headers in the worst case."""


def field_named(name: str) -> Field:
    """Look a field up, prefixes included. SchemaError if the schema does not declare it."""
    found = SCHEMA.get(name)
    if found is not None:
        return found
    for prefix, spec in _PREFIXED.items():
        if name.startswith(prefix) and len(name) > len(prefix):
            return spec
    raise SchemaError(f"unknown field {name!r}; declared: {', '.join([*SCHEMA, *(p + '<name>' for p in _PREFIXED)])}")


def check_row(row_id: str, topic: str, fields: Mapping[str, FieldValue]) -> dict[str, Array | Json]:
    """Check one row against the schema and return its fields, scalars as rank-0 arrays.

    Raises SchemaError naming the row, the field and the fault: unknown name, wrong topic, dtype
    or rank, unequal lengths within a length group, or a value that JSON cannot hold.
    """
    if not fields:
        raise SchemaError(f"row {row_id}: no fields")
    checked: dict[str, Array | Json] = {}
    lengths: dict[str, dict[str, int]] = {}
    for name, value in fields.items():
        spec = field_named(name)
        if spec.topic != topic:
            raise SchemaError(f"row {row_id}: field {name!r} belongs to topic {spec.topic!r}, not {topic!r}")
        checked[name] = _check_array(row_id, name, spec, value) if spec.kind == "array" else value
        if spec.length_group is not None:
            lengths.setdefault(spec.length_group, {})[name] = len(checked[name])
    for group, by_field in lengths.items():
        if len(set(by_field.values())) > 1:
            raise SchemaError(f"row {row_id}: unequal lengths in {group}: {by_field}")
    return checked


def _check_array(row_id: str, name: str, spec: Field, value: FieldValue) -> Array:
    if spec.rank == 0 and isinstance(value, (float, int)) and not isinstance(value, bool):
        value = np.asarray(value, dtype=spec.dtypes[0])
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        raise SchemaError(f"row {row_id}: field {name!r} must be a NumPy array, not {type(value).__name__}")
    if dtype_name(value.dtype) not in spec.dtypes:
        raise SchemaError(f"row {row_id}: field {name!r} has dtype {value.dtype.name}, not {' or '.join(spec.dtypes)}")
    if value.ndim != spec.rank:
        raise SchemaError(f"row {row_id}: field {name!r} has rank {value.ndim}, not {spec.rank}")
    return value


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """NumPy computes the name anew at each look."""
    return dtype.name


_PLAIN_JSON = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_STRICT_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def json_bytes(row_id: str, name: str, value: Json) -> bytes:
    """Canonical UTF-8 JSON of a field: equal values give equal digests. NaN is refused."""
    try:
        text = orjson.dumps(value, option=_PLAIN_JSON)
        if b"null" not in text:
            return text
    except TypeError:
        pass  # nothing that orjson knows: integers above 64 bits and keys that are no strings are JSON all the same
    try:
        return _STRICT_JSON.encode(value).encode()  # to orjson a NaN is a null
    except (TypeError, ValueError) as error:
        raise SchemaError(f"row {row_id}: field {name!r} is not JSON: {error}") from error


def derived_tags(fields: Mapping[str, FieldValue]) -> dict[str, Scalar]:
    """Tags that follow from the fields, so that selection and events need no bytes."""
    tags: dict[str, Scalar] = {}
    for name, value in fields.items():
        spec = field_named(name)
        if spec.kind == "array" and spec.rank == 0 and isinstance(value, np.ndarray):
            tags[name] = value.item()
        elif spec.length_group == "T":
            tags["tokens"] = len(value)
    for name in ("reward_state", "finish_reason"):
        value = fields.get(name)
        if isinstance(value, str):
            tags[name] = value
    versions = fields.get("versions")
    if isinstance(versions, np.ndarray):
        sampled = versions[versions != NO_VERSION]
        if sampled.size:
            tags["oldest_version"] = int(sampled.min())
            tags["newest_version"] = int(sampled.max())
    return tags


def bytes_per_token(fields: Iterable[str] = TOKEN_FIELDS, top_k: int = 0) -> int:
    """Bytes per token over the named fields; rank-2 fields hold `top_k` entries per token."""
    total = 0
    for name in fields:
        spec = field_named(name)
        if spec.length_group == "T":
            total += np.dtype(spec.dtypes[0]).itemsize * (top_k if spec.rank == 2 else 1)
    return total

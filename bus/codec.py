"""All fields of one put of one row, packed into one blob of bytes. No pickle.

    magic u32 | row id length u32 | layout length u32 | row id | layout | padding | field bytes, each aligned to 8

The layout is the JSON `[[name, dtype or null, shape, bytes], ...]`: apart from the row id, so that rows of
one shape share it and it is written and parsed once. The row id guards against a storage row that was
given to another bus row meanwhile. One blob is one column of TransferQueue, whose cost is per
(row, column) and hardly depends on the bytes. Small blobs are `bytes`, which travel within one message; an array
is a frame of its own on the wire, which is copied less often but costs more than copying some ten kilobytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bus.errors import CorruptRow
from bus.records import Array, FieldValue
from bus.schema import dtype_name, json_bytes
from relax.types import Json

Blob = bytes | npt.NDArray[np.uint8]
INLINE_BYTES = 32_768
"""Blobs below are `bytes`."""

DIGEST_BYTES = 16
_MAGIC = 0x52425532
_PREFIX = struct.Struct("<III")
_LAYOUTS_KEPT = 4096
_ALIGN = 8
_JSON = json.JSONDecoder()
"""`raw_decode` does without the search for white space around a value, which costs more than a short value itself."""

if sys.byteorder != "little":
    raise ImportError("the bus stores little-endian bytes and does not swap them")


_Entry = tuple[str, str | None, tuple[int, ...], int]
"""Of the layout: name, dtype or None for JSON, shape, bytes."""


class _Stored(NamedTuple):
    """An entry as it is read: `room` are its bytes with padding, `begun` the digest before its data."""

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    size: int
    room: int
    begun: hashlib.blake2b


class EncodedField(NamedTuple):
    """A field as it is stored. dtype is None for JSON."""

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    data: bytes
    digest: bytes


def encode_field(row_id: str, name: str, value: FieldValue) -> EncodedField:
    """Bytes and blake2b digest of one field. Equal values give equal digests."""
    if isinstance(value, np.ndarray):
        data, dtype = value.tobytes(), dtype_name(value.dtype)
        return EncodedField(name, dtype, value.shape, data, digest_of(dtype, value.shape, data))
    data = json_bytes(row_id, name, value)
    return EncodedField(name, None, (len(data),), data, digest_of(None, (len(data),), data))


def digest_of(dtype: str | None, shape: tuple[int, ...], data: bytes | memoryview) -> bytes:
    digest = _begun(dtype, shape).copy()
    digest.update(data)
    return digest.digest()


@lru_cache(_LAYOUTS_KEPT)
def _begun(dtype: str | None, shape: tuple[int, ...]) -> hashlib.blake2b:
    return hashlib.blake2b(f"{dtype}{shape}".encode(), digest_size=DIGEST_BYTES)


def pack(row_id: str, fields: list[EncodedField]) -> Blob:
    """One blob of the given fields: bytes, or from `INLINE_BYTES` on uint8 [n]."""
    owner = row_id.encode()
    layout = _layout(tuple([(f.name, f.dtype, f.shape, len(f.data)) for f in fields]))
    parts = [_PREFIX.pack(_MAGIC, len(owner), len(layout)), owner, layout]
    parts.append(_padding(_PREFIX.size + len(owner) + len(layout)))
    for f in fields:
        parts += (f.data, _padding(len(f.data)))
    blob = b"".join(parts)
    return blob if len(blob) < INLINE_BYTES else np.frombuffer(bytearray(blob), dtype=np.uint8)


def unpack(blob: Blob, row_id: str, wanted: Mapping[str, bytes]) -> dict[str, FieldValue]:
    """The wanted fields (name -> digest) of a blob, arrays as read-only views of it.

    Raises CorruptRow when the blob is of another row, a field is missing, or a digest differs.
    """
    stored = memoryview(blob) if isinstance(blob, bytes) else blob.data
    owner, entries, start = _header(stored, row_id)
    if owner != row_id:
        raise CorruptRow(f"storage of row {row_id} holds row {owner}")
    found: dict[str, FieldValue] = {}
    for entry in entries:
        if entry.name in wanted:
            data = stored[start : start + entry.size]
            digest = entry.begun.copy()
            digest.update(data)
            if digest.digest() != wanted[entry.name]:
                raise CorruptRow(f"row {row_id}: digest of field {entry.name!r} differs from what was written")
            found[entry.name] = _json_value(data) if entry.dtype is None else _view(data, entry)
        start += entry.room
    missing = wanted.keys() - found.keys()
    if missing:
        raise CorruptRow(f"row {row_id}: fields {sorted(missing)} are not in the blob that should hold them")
    return found


def _header(blob: memoryview, row_id: str) -> tuple[str, tuple[_Stored, ...], int]:
    if len(blob) < _PREFIX.size:
        raise CorruptRow(f"row {row_id}: blob of {len(blob)} bytes")
    magic, owner_bytes, layout_bytes = _PREFIX.unpack_from(blob)
    end = _PREFIX.size + owner_bytes + layout_bytes
    if magic != _MAGIC or end > len(blob):
        raise CorruptRow(f"row {row_id}: not a blob of the bus")
    head = bytes(blob[_PREFIX.size : end])
    try:
        return head[:owner_bytes].decode(), _entries(head[owner_bytes:]), _aligned(end)
    except (ValueError, TypeError) as error:
        raise CorruptRow(f"row {row_id}: broken blob header: {error}") from error


@lru_cache(_LAYOUTS_KEPT)
def _layout(entries: tuple[_Entry, ...]) -> bytes:
    return json.dumps(entries).encode()


@lru_cache(_LAYOUTS_KEPT)
def _entries(layout: bytes) -> tuple[_Stored, ...]:
    entries = []
    for name, dtype, dimensions, size in json.loads(layout):
        shape = tuple(dimensions)
        if dtype is not None and size != np.dtype(dtype).itemsize * math.prod(shape):
            raise ValueError(f"{size} bytes do not make {dtype}{shape}")
        kind = None if dtype is None else np.dtype(dtype)
        entries.append(_Stored(name, kind, shape, size, _aligned(size), _begun(dtype, shape)))
    return tuple(entries)


def _json_value(data: memoryview) -> Json:
    """Of canonical JSON. Integers of any size stay exact, which faster parsers do not promise."""
    value, _ = _JSON.raw_decode(str(data, "utf-8"))
    return value


def _view(data: memoryview, entry: _Stored) -> Array:
    array: Array = np.frombuffer(data, entry.dtype)
    if len(entry.shape) != 1:
        array = array.reshape(entry.shape)
    array.flags.writeable = False
    return array


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _padding(size: int) -> bytes:
    return bytes(-size % _ALIGN)

"""All fields of one put of one row, packed into one blob of bytes. No pickle.

    magic u32 | header length u32 | header JSON | padding | field bytes, each aligned to 8

The header is `[row_id, [[name, dtype or null, shape, bytes], ...]]`; the row id guards against
a storage row that was given to another bus row meanwhile. One blob is one column of TransferQueue,
whose cost is per (row, column) and hardly depends on the bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bus.errors import CorruptRow
from bus.records import Array, FieldValue
from bus.schema import dtype_name, json_bytes

Blob = npt.NDArray[np.uint8]

DIGEST_BYTES = 16
_MAGIC = 0x52425531
_PREFIX = struct.Struct("<II")
_ALIGN = 8

if sys.byteorder != "little":
    raise ImportError("the bus stores little-endian bytes and does not swap them")


class EncodedField(NamedTuple):
    """A field as it is stored. dtype is None for JSON. `data`: its bytes, uint8 [n]."""

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    data: Blob
    digest: bytes


def encode_field(row_id: str, name: str, value: FieldValue) -> EncodedField:
    """Bytes and blake2b digest of one field. Equal values give equal digests."""
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        data = array.reshape(-1).view(np.uint8)
        dtype = dtype_name(value.dtype)
        return EncodedField(name, dtype, value.shape, data, digest_of(dtype, value.shape, data))
    data = np.frombuffer(json_bytes(row_id, name, value), dtype=np.uint8)
    return EncodedField(name, None, (len(data),), data, digest_of(None, (len(data),), data))


def digest_of(dtype: str | None, shape: tuple[int, ...], data: Blob) -> bytes:
    digest = hashlib.blake2b(f"{dtype}{shape}".encode(), digest_size=DIGEST_BYTES)
    digest.update(data.data)
    return digest.digest()


def pack(row_id: str, fields: list[EncodedField]) -> Blob:
    """One blob, uint8 [n], of the given fields."""
    header = json.dumps([row_id, [[f.name, f.dtype, f.shape, len(f.data)] for f in fields]]).encode()
    start = _aligned(_PREFIX.size + len(header))
    blob = np.zeros(start + sum(_aligned(len(f.data)) for f in fields), dtype=np.uint8)
    _PREFIX.pack_into(blob.data, 0, _MAGIC, len(header))
    blob[_PREFIX.size : _PREFIX.size + len(header)] = np.frombuffer(header, dtype=np.uint8)
    for f in fields:
        blob[start : start + len(f.data)] = f.data
        start += _aligned(len(f.data))
    return blob


def unpack(blob: Blob, row_id: str, wanted: Mapping[str, bytes]) -> dict[str, FieldValue]:
    """The wanted fields (name -> digest) of a blob, arrays as read-only views of it.

    Raises CorruptRow when the blob is of another row, a field is missing, or a digest differs.
    """
    owner, entries, start = _header(blob, row_id)
    if owner != row_id:
        raise CorruptRow(f"storage of row {row_id} holds row {owner}")
    found: dict[str, FieldValue] = {}
    for name, dtype, shape, size in entries:
        if name in wanted:
            data = blob[start : start + size]
            if digest_of(dtype, tuple(shape), data) != wanted[name]:
                raise CorruptRow(f"row {row_id}: digest of field {name!r} differs from what was written")
            found[name] = json.loads(data.tobytes()) if dtype is None else _view(data, dtype, shape)
        start += _aligned(size)
    missing = wanted.keys() - found.keys()
    if missing:
        raise CorruptRow(f"row {row_id}: fields {sorted(missing)} are not in the blob that should hold them")
    return found


def _header(blob: Blob, row_id: str) -> tuple[str, list[Any], int]:
    if len(blob) < _PREFIX.size:
        raise CorruptRow(f"row {row_id}: blob of {len(blob)} bytes")
    magic, length = _PREFIX.unpack_from(blob.data)
    end = _PREFIX.size + length
    if magic != _MAGIC or end > len(blob):
        raise CorruptRow(f"row {row_id}: not a blob of the bus")
    try:
        owner, entries = json.loads(blob[_PREFIX.size : end].tobytes())
    except ValueError as error:
        raise CorruptRow(f"row {row_id}: broken blob header: {error}") from error
    return owner, entries, _aligned(end)


def _view(data: Blob, dtype: str, shape: list[int]) -> Array:
    if len(data) != np.dtype(dtype).itemsize * math.prod(shape):
        raise CorruptRow(f"{len(data)} bytes do not make {dtype}{shape}")
    array: Array = data.view(dtype).reshape(shape)
    array.flags.writeable = False
    return array


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN

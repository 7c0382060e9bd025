"""Frames between the pool and its workers: a 4-byte big-endian length, then JSON in UTF-8.

pool -> worker   {"spec", "base", "memory_bytes"}      once, at start
worker -> pool   {"ready": true} | {"error": text}     once
pool -> worker   [request, ...]                        a batch; the next one only after the end of this one
worker -> pool   result, ...                           one frame per request, in order, each when it is done
pool -> worker   {"skip_rest": true}                   leave out what is not begun; void after the batch
worker -> pool   {"grown_bytes": n}                    ends a batch: address space added since the start

No pickle: what user code leaves on the pipe is parsed as data only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable

from relax.types import Json, RelaxError

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 28
"""A longer frame means that the stream is out of step."""

_COMPACT = json.JSONEncoder(separators=(",", ":"))

SKIP_REST: dict[str, Json] = {"skip_rest": True}


class WireError(RelaxError, ValueError):
    """The peer sent something that is no frame."""


def encode(value: Json) -> bytes:
    """One frame.

    Raises:
        TypeError: not a JSON value.
    """
    return _frame(encode_body(value))


def encode_body(value: Json) -> bytes:
    """The JSON of a value, without a header. Raises `TypeError` if it is not a JSON value."""
    return _COMPACT.encode(value).encode()


def encode_array(bodies: Iterable[bytes]) -> bytes:
    """One frame with an array of values that are encoded already."""
    return _frame(b"[" + b",".join(bodies) + b"]")


def _frame(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


class FrameDecoder:
    """Cuts a byte stream into frames, however it was split on the way."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Json]:
        """The values of all frames that `data` completed.

        Raises:
            WireError: a length beyond `MAX_FRAME_BYTES`, or a body that is no JSON.
        """
        self._buffer += data
        values = []
        position = 0
        while len(self._buffer) - position >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, position)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes")
            end = position + HEADER.size + length
            if len(self._buffer) < end:
                break
            body = self._buffer[position + HEADER.size : end]
            try:
                values.append(json.loads(body))
            except ValueError as error:
                raise WireError(f"a frame is no JSON: {error}") from error
            position = end
        del self._buffer[:position]
        return values

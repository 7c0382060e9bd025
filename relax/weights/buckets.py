"""Bucket files in safetensors format: written from live tensors without a second copy, read back mapped.

The writer is our own because the library's takes a whole dict of host tensors at once and reports a full
disk as text. Reading is by bytes, so that a process that only verifies needs no torch; the library checks
each file first. The format (8-byte header length, JSON header, data) is the library's.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from safetensors import SafetensorError, safe_open

from relax.config.run import Fault
from relax.weights.digest import dtype_name, host_bytes
from relax.weights.manifest import CorruptWeights, Manifest, WeightsError

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPES = {in_file: name for name, in_file in _FORMAT_DTYPES.items()}
_HEADER_ALIGN = 8
_BUCKET = re.compile(r"bucket-\d{5,}\.safetensors")


def n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def in_buckets(
    tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """(file name, tensors) with at most `bucket_bytes` each; a larger tensor has a bucket of its own.

    Only the tensors of one bucket are referenced at a time.
    """
    index, held = 0, 0
    bucket: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if bucket and held + n_bytes(tensor) > bucket_bytes:
            yield bucket_name(index), bucket
            index, held, bucket = index + 1, 0, []
        bucket.append((name, tensor))
        held += n_bytes(tensor)
    if bucket:
        yield bucket_name(index), bucket


def bucket_name(index: int) -> str:
    return f"bucket-{index:05d}.safetensors"


def is_bucket_name(name: str) -> bool:
    return _BUCKET.fullmatch(name) is not None


def write_bucket(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raises `OSError` (ENOSPC before the first byte where the filesystem can reserve)."""
    # Wide types first: every tensor is then aligned to its own element size in the mapping.
    ordered = sorted(tensors, key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in ordered:
        dtype = dtype_name(tensor.dtype)
        if dtype not in _FORMAT_DTYPES:
            raise WeightsError(f"tensor '{name}' has dtype {dtype}, which a bucket cannot hold")
        end = offset + n_bytes(tensor)
        header[name] = {
            "dtype": _FORMAT_DTYPES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGN)
    with path.open("xb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + offset)
        _write_all(file, memoryview(len(text).to_bytes(8, "little") + text))
        for _, tensor in ordered:
            _write_all(file, host_bytes(tensor))


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a mapped file. `data`: its bytes in row-major order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def tensor(self) -> Tensor:
        """The same memory, not a copy: do not write to it."""
        import torch

        dtype = getattr(torch, self.dtype)
        if not len(self.data):
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(self.data, dtype=dtype).reshape(self.shape)


class MappedBuckets:
    """All buckets of one version, mapped at once: they stay readable after the folder was removed."""

    def __init__(self, folder: Path, manifest: Manifest):
        self._tensors: dict[str, StoredTensor] = {}
        self.names_by_bucket: dict[str, set[str]] = {}
        for bucket in manifest.buckets:
            stored = _read_bucket(folder / bucket)
            self._tensors.update(stored)
            self.names_by_bucket[bucket] = set(stored)

    def get(self, name: str) -> StoredTensor | None:
        return self._tensors.get(name)


def _read_bucket(path: Path) -> dict[str, StoredTensor]:
    """Raises `CorruptWeights` unless the file is whole by its own header, `FileNotFoundError`."""
    with path.open("rb") as file:
        try:
            with safe_open(path, framework="np") as checked:  # lengths, offsets and shapes agree
                names = set(checked.keys())
        except SafetensorError as error:
            raise CorruptWeights(f"{path} is not a whole bucket: {error}") from error
        # Copy on write: torch takes a buffer as its own only if it could write to it.
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    stored = {}
    for name in names:
        begin, end = header[name]["data_offsets"]
        dtype = _DTYPES[header[name]["dtype"]]
        stored[name] = StoredTensor(dtype, tuple(header[name]["shape"]), data[start + begin : start + end])
    return stored


def inject_faults(folder: Path, manifest: Manifest, faults: Sequence[Fault]) -> None:
    """Damage the stored buckets behind the manifest's back, as the test of a safeguard asked."""
    if Fault.DROP_TENSOR in faults and manifest.tensors:
        victim = min(manifest.tensors)
        bucket = manifest.tensors[victim].bucket
        mapped = MappedBuckets(folder, manifest)
        rest = [(name, mapped.get(name)) for name in mapped.names_by_bucket[bucket] if name != victim]
        (folder / bucket).unlink()
        write_bucket(folder / bucket, [(name, stored.tensor()) for name, stored in rest if stored is not None])
    if Fault.CORRUPT_BUCKET in faults:
        for bucket in manifest.buckets:
            with (folder / bucket).open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 0xFF]))

"""Bucket files in safetensors format: written from live tensors without a second copy, read back mapped.

The writer is our own because the library's takes a whole dict of host tensors at once and reports a full
disk as text; the format (8-byte header length, JSON header, data) is the library's, which also reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from relax.config.run import Fault
from relax.weights.digest import host_bytes
from relax.weights.manifest import CorruptWeights, Manifest, WeightsError

_FORMAT_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_HEADER_ALIGN = 8


def n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def in_buckets(
    tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """(file name, tensors) with at most `bucket_bytes` each; a larger tensor has a bucket of its own.

    Only the tensors of one bucket are referenced at a time.
    """
    index, held, bucket = 0, 0, list[tuple[str, Tensor]]()
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


def write_bucket(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raises `OSError` (ENOSPC before the first byte where the filesystem can reserve)."""
    # Wide types first: every tensor is then aligned to its own element size in the mapping.
    ordered = sorted(tensors, key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in ordered:
        if tensor.dtype not in _FORMAT_DTYPES:
            raise WeightsError(f"tensor '{name}' has dtype {tensor.dtype}, which a bucket cannot hold")
        end = offset + n_bytes(tensor)
        header[name] = {
            "dtype": _FORMAT_DTYPES[tensor.dtype],
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


class MappedBuckets:
    """All buckets of one version, mapped at once: they stay readable after the folder was removed."""

    def __init__(self, folder: Path, manifest: Manifest):
        self._tensors: dict[str, Tensor] = {}
        self.names_by_bucket: dict[str, set[str]] = {}
        with ExitStack() as opened:
            for bucket in manifest.buckets:
                try:
                    file = opened.enter_context(safe_open(folder / bucket, framework="pt"))
                    names = set(file.keys())
                    self._tensors.update({name: file.get_tensor(name) for name in names})
                except SafetensorError as error:
                    raise CorruptWeights(f"{folder / bucket} is not a whole bucket: {error}") from error
                self.names_by_bucket[bucket] = names

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)


def inject_faults(folder: Path, manifest: Manifest, faults: Sequence[Fault]) -> None:
    """Damage the stored buckets behind the manifest's back, as the test of a safeguard asked."""
    if Fault.DROP_TENSOR in faults and manifest.tensors:
        victim = min(manifest.tensors)
        bucket = manifest.tensors[victim].bucket
        mapped = MappedBuckets(folder, manifest)
        rest = [(name, mapped.get(name)) for name in mapped.names_by_bucket[bucket] if name != victim]
        (folder / bucket).unlink()
        write_bucket(folder / bucket, [(name, tensor) for name, tensor in rest if tensor is not None])
    if Fault.CORRUPT_BUCKET in faults:
        for bucket in manifest.buckets:
            with (folder / bucket).open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 0xFF]))

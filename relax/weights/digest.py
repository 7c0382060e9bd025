"""Content digests of tensors: blake2b-128 of the little-endian bytes, and one digest over all of them.

Independent of device, memory layout and order, so that a trainer, a file and an engine can be compared.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DIGEST_BYTES = 16

if sys.byteorder != "little":
    raise ImportError("relax.weights stores tensors as they lie in memory and needs a little-endian machine")


class TensorFacts(Protocol):
    """What the digest of a version covers of one tensor, its name apart."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def digest(self) -> str: ...


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, `bfloat16`, ..."""
    return str(dtype).removeprefix("torch.")


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; no copy for a contiguous tensor in host memory."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array.data


def bytes_digest(data: memoryview) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    return bytes_digest(host_bytes(tensor))


def version_digest(tensors: Mapping[str, TensorFacts]) -> str:
    """One digest over sorted (name, dtype, shape, tensor digest)."""
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(tensors):
        facts = tensors[name]
        # repr separates the parts: no two lists of tensors give the same text.
        whole.update(repr((name, facts.dtype, tuple(facts.shape), facts.digest)).encode())
    return whole.hexdigest()


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The digest that `Manifest.digest` of these tensors would have. Raises `ValueError` on a repeated name."""
    facts: dict[str, _Facts] = {}
    for name, tensor in tensors:
        if name in facts:
            raise ValueError(f"tensor '{name}' is given twice")
        facts[name] = _Facts(dtype_name(tensor.dtype), tuple(tensor.shape), tensor_digest(tensor))
    return version_digest(facts)


class _Facts:
    __slots__ = ("digest", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], digest: str):
        self.dtype = dtype
        self.shape = shape
        self.digest = digest

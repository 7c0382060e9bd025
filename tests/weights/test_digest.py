"""Digests of live tensors."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from relax.weights.digest import host_bytes, tensor_digest, tensors_digest


def test_a_tensor_digest_is_blake2b_128_of_its_little_endian_bytes() -> None:
    """behaviour: B2"""
    values = np.array([[1.0, -2.5], [3.25, 0.0]], dtype="<f4")
    expected = hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()
    assert tensor_digest(torch.from_numpy(values)) == expected


def test_the_digest_of_a_version_does_not_depend_on_order_or_memory_layout() -> None:
    """behaviour: B2"""
    a, b = torch.arange(12.0).reshape(3, 4), torch.arange(6, dtype=torch.bfloat16)
    transposed = a.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert tensors_digest([("a", a), ("b", b)]) == tensors_digest(iter([("b", b.clone()), ("a", transposed)]))


@pytest.mark.parametrize(
    "other",
    [
        [("a", torch.zeros(4))],
        [("a", torch.zeros(2, 2)), ("b", torch.zeros(0))],
        [("c", torch.zeros(2, 2))],
        [("a", torch.zeros(2, 2, dtype=torch.int32))],
        [("a", torch.tensor([[0.0, 0.0], [0.0, -0.0]]))],
    ],
    ids=["shape", "extra tensor", "name", "dtype", "one bit"],
)
def test_the_digest_of_a_version_covers_names_dtypes_shapes_and_every_bit(
    other: list[tuple[str, torch.Tensor]],
) -> None:
    """behaviour: B2"""
    assert tensors_digest([("a", torch.zeros(2, 2))]) != tensors_digest(other)


def test_a_repeated_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' is given twice"):
        tensors_digest([("a", torch.zeros(1)), ("a", torch.zeros(1))])


@pytest.mark.parametrize("tensor", [torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 3), torch.ones(2).bool()])
def test_scalars_empty_and_byte_tensors_have_their_own_bytes(tensor: torch.Tensor) -> None:
    assert len(host_bytes(tensor)) == tensor.numel() * tensor.element_size()


def test_hashing_a_contiguous_host_tensor_copies_nothing() -> None:
    tensor = torch.zeros(8)
    view = host_bytes(tensor)
    tensor[0] = 1.0
    assert bytes(view[:4]) == np.float32(1.0).tobytes()

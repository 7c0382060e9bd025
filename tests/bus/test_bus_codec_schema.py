"""The border: schema checks, canonical bytes, blobs."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.codec import digest_of, encode_field, pack, unpack
from bus.errors import CorruptRow, SchemaError
from bus.records import PROMPTS, SAMPLES
from bus.schema import TOKEN_FIELDS, bytes_per_token, check_row, derived_tags

ROW = "s:0:0/1/0"


def sample(tokens: int = 3) -> dict[str, Any]:
    return {
        "tokens": np.arange(tokens, dtype=np.int32),
        "loss_mask": np.ones(tokens, dtype=np.bool_),
        "rollout_logprobs": np.zeros(tokens, dtype=np.float32),
        "versions": np.array([-1, *range(4, 3 + tokens)], dtype=np.int32),
    }


def test_unequal_lengths_are_refused_with_their_names() -> None:
    """behaviour: B23"""
    row = sample() | {"loss_mask": np.ones(2, dtype=np.bool_)}
    with pytest.raises(SchemaError, match=r"unequal lengths in T: .*'loss_mask': 2"):
        check_row(ROW, SAMPLES, row)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.arange(3)}, "dtype int64, not int32"),
        ({"tokens": np.zeros((3, 1), np.int32)}, "rank 2, not 1"),
        ({"tokens": [1, 2, 3]}, "must be a NumPy array, not list"),
        ({"reward": "high"}, "must be a NumPy array, not str"),
        ({"reward": np.zeros((), np.float64)}, "dtype float64, not float32"),
        ({"logprobs": np.zeros(3, np.float32)}, "unknown field 'logprobs'"),
        ({"media.": {}}, "unknown field"),
        ({"prompt": {}}, "belongs to topic 'prompts'"),
        ({"teacher_topk_ids": np.zeros((2, 4), np.int32)}, "unequal lengths"),
    ],
)
def test_a_field_that_breaks_the_schema_is_named(change: dict[str, Any], message: str) -> None:
    """behaviour: B23"""
    with pytest.raises(SchemaError, match=message):
        check_row(ROW, SAMPLES, sample() | change)


def test_a_correct_row_passes_and_scalars_become_float32() -> None:
    row = sample() | {
        "reward": 0.5,
        "accuracy": np.float32(1),
        "teacher_logprobs": np.zeros(3, np.float32),
        "routed_experts": np.zeros((2, 4, 2), np.uint8),
        "reward_state": "ok",
    }
    checked = check_row(ROW, SAMPLES, row)
    assert checked["reward"].dtype == np.float32
    assert checked["reward"].shape == ()
    assert check_row("s:0:0", PROMPTS, {"prompt": {"text": "1+1"}})
    with pytest.raises(SchemaError, match="no fields"):
        check_row(ROW, SAMPLES, {})


def test_tags_follow_from_the_fields() -> None:
    checked = check_row(ROW, SAMPLES, sample() | {"reward": 0.5, "reward_state": "ok", "finish_reason": "stop"})
    assert derived_tags(checked) == {
        "tokens": 3,
        "reward": 0.5,
        "reward_state": "ok",
        "finish_reason": "stop",
        "oldest_version": 4,
        "newest_version": 5,
    }


def test_bytes_per_token_count_every_field() -> None:
    assert bytes_per_token(TOKEN_FIELDS) == 4 + 1 + 4 + 4 + 4 + 4 + 4 + 4
    assert bytes_per_token(("teacher_topk_ids", "teacher_topk_logprobs", "reward"), top_k=8) == 64


ARRAYS = st.sampled_from(["int32", "bool", "float32", "uint8", "int16"]).flatmap(
    lambda dtype: st.lists(st.integers(0, 4), min_size=0, max_size=3).map(
        lambda shape: np.random.default_rng(len(shape)).integers(0, 2, size=shape).astype(dtype)
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(deadline=None)
@given(
    fields=st.dictionaries(st.text(min_size=1, max_size=5), ARRAYS | VALUES, min_size=1, max_size=4), row_id=st.text()
)
def test_what_was_packed_is_unpacked(fields: dict[str, Any], row_id: str) -> None:
    encoded = [encode_field(row_id, name, value) for name, value in fields.items()]
    back = unpack(pack(row_id, encoded), row_id, {field.name: field.digest for field in encoded})
    assert back.keys() == fields.keys()
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            got = back[name]
            assert isinstance(got, np.ndarray)
            assert (got.dtype, got.shape) == (value.dtype, value.shape)
            assert np.array_equal(got, value)
            assert not got.flags.writeable
        else:
            assert back[name] == value


@pytest.mark.parametrize(("tokens", "kind"), [(100, bytes), (100_000, np.ndarray)])
def test_a_small_blob_travels_within_a_message_and_a_large_one_as_a_frame(tokens: int, kind: type) -> None:
    field = encode_field(ROW, "tokens", np.arange(tokens, dtype=np.int32))
    blob = pack(ROW, [field])
    assert isinstance(blob, kind)
    assert np.array_equal(unpack(blob, ROW, {"tokens": field.digest})["tokens"], np.arange(tokens))


def test_equal_bytes_of_another_dtype_or_shape_have_another_digest() -> None:
    zeros = np.zeros(4, np.uint8)
    digests = {digest_of(dtype, shape, zeros) for dtype, shape in (("int32", (1,)), ("float32", (1,)), ("uint8", (4,)))}
    assert len(digests) == 3


def test_json_has_one_digest_whatever_the_order_of_keys_and_refuses_nan() -> None:
    assert encode_field(ROW, "f", {"a": 1, "b": 2}).digest == encode_field(ROW, "f", {"b": 2, "a": 1}).digest
    for value in (float("nan"), float("inf"), object(), b"bytes", {1}, date(2026, 1, 1)):
        with pytest.raises(SchemaError, match="not JSON"):
            encode_field(ROW, "reward_parts", {"x": [None, value]})


def test_large_integers_keys_that_are_no_strings_and_lone_surrogates_come_back_as_json_has_them() -> None:
    value = {"n": 10**30, "m": -(2**63) - 1, "d": {3: None}, "s": "\ud800"}
    field = encode_field(ROW, "metadata", value)
    back = unpack(pack(ROW, [field]), ROW, {"metadata": field.digest})["metadata"]
    assert back == {"n": 10**30, "m": -(2**63) - 1, "d": {"3": None}, "s": "\ud800"}


def test_a_flipped_byte_is_found() -> None:
    field = encode_field(ROW, "tokens", np.arange(4, dtype=np.int32))
    blob = bytearray(pack(ROW, [field]))
    blob[-1] ^= 1
    with pytest.raises(CorruptRow, match="digest of field 'tokens'"):
        unpack(bytes(blob), ROW, {"tokens": field.digest})


def test_a_blob_of_another_row_is_refused() -> None:
    """A storage row that was cleared and given to another row meanwhile."""
    field = encode_field(ROW, "tokens", np.arange(4, dtype=np.int32))
    with pytest.raises(CorruptRow, match="holds row s:0:1/0/0"):
        unpack(pack("s:0:1/0/0", [field]), ROW, {"tokens": field.digest})


@pytest.mark.parametrize("size", [0, 4, 8, 20])
def test_a_truncated_blob_is_refused(size: int) -> None:
    field = encode_field(ROW, "tokens", np.arange(4, dtype=np.int32))
    blob = pack(ROW, [field])[:size]
    with pytest.raises(CorruptRow):
        unpack(blob, ROW, {"tokens": field.digest})


def test_a_missing_field_is_refused() -> None:
    field = encode_field(ROW, "tokens", np.arange(4, dtype=np.int32))
    with pytest.raises(CorruptRow, match="versions"):
        unpack(pack(ROW, [field]), ROW, {"tokens": field.digest, "versions": b""})

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.rewards.wire import HEADER, FrameDecoder, WireError, encode, encode_array, encode_body

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(values, max_size=4), st.integers(1, 7))
def test_frames_survive_any_split_of_the_stream(sent: list[object], step: int) -> None:
    stream = b"".join(encode(value) for value in sent)
    decoder = FrameDecoder()
    received = [value for at in range(0, len(stream), step) for value in decoder.feed(stream[at : at + step])]
    assert received == sent


def test_a_lone_surrogate_in_a_response_survives() -> None:
    assert FrameDecoder().feed(encode("\ud800")) == ["\ud800"]


def test_an_array_frame_holds_the_values_in_order() -> None:
    assert FrameDecoder().feed(encode_array([encode_body(1), encode_body("a")])) == [[1, "a"]]


@pytest.mark.parametrize("data", [HEADER.pack(1 << 30), HEADER.pack(3) + b"{x}"])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        FrameDecoder().feed(data)

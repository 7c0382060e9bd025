"""Stop strings: found in decoded text while the sampled ids stay as drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from relax.types import IntArray


class DecodesTokens(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


# A character is at most four bytes of UTF-8, so four tokens of a byte-level vocabulary; the rest is room for
# what a tokenizer does differently at the start of a text.
_TOKENS_PER_CHARACTER = 4
_SLACK_TOKENS = 8


def tail_tokens(stops: Sequence[str]) -> int:
    """How many of the newest tokens can hold the end of a match that the token before them did not complete."""
    return _TOKENS_PER_CHARACTER * max(map(len, stops)) + _SLACK_TOKENS


def first_match(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Position and string of the earliest match, the longest one at equal position."""
    found = [(text.find(stop), -len(stop), stop) for stop in stops]
    hits = sorted(hit for hit in found if hit[0] >= 0)
    return (hits[0][0], hits[0][2]) if hits else None


def match_in_tail(ids: IntArray, tokenizer: DecodesTokens, stops: Sequence[str]) -> str | None:
    """The stop string that the newest token completed, if any. To be asked after every token. ids: [N] generated."""
    tail = ids[-tail_tokens(stops) :]
    hit = first_match(tokenizer.decode(tail.tolist()), stops)
    return None if hit is None else hit[1]


def visible_text(ids: Sequence[int], tokenizer: DecodesTokens, matched: int | str | None) -> str:
    """The answer's text: without the end token or the stop string that ended it and what follows it."""
    if isinstance(matched, int):
        return tokenizer.decode(ids[:-1])
    text = tokenizer.decode(ids)
    if matched is None:
        return text
    at = text.find(matched)
    return text if at < 0 else text[:at]

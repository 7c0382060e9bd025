"""What a prompt source draws from: rows with an index, before epochs and order come in."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Protocol

from relax.data.recorded import Recorded
from relax.data.tokenizer import Tokenizer
from relax.types import DataError, Json, Prompt

KEPT_REASONS = 20
"""Full texts kept of skipped rows; the counts have no limit."""


@dataclass(frozen=True, slots=True)
class Row:
    """One task instance. `where` names it in messages: file and line, or source and index."""

    index: int
    where: str
    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None
    label: Json = None
    metadata: dict[str, Json] = field(default_factory=dict)

    def to_prompt(self, source: str, epoch: int) -> Prompt:
        return Prompt(source, epoch, self.index, self.messages, self.text, self.label, self.metadata)


class Rows(Protocol):
    """A fixed sequence of rows. `checked`: every row was checked at the start, none can be bad later."""

    name: str
    checked: bool

    def __len__(self) -> int: ...

    def row(self, position: int) -> Row:
        """Row at a position in [0, len). Equal for equal positions, always."""
        ...

    def identity(self) -> dict[str, Json]:
        """What makes these rows these rows; two sources with equal identity give equal rows."""
        ...


class BadRow(DataError):
    """A row that cannot be used. `kind` is the counted reason; the message has the place and the remedy."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class SkipLog:
    """Counts skipped rows by kind and keeps the first full reasons."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.reasons: list[str] = []

    def add(self, bad: BadRow) -> None:
        self.counts[bad.kind] = self.counts.get(bad.kind, 0) + 1
        if len(self.reasons) < KEPT_REASONS:
            self.reasons.append(str(bad))

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class RowCheck:
    """Refuses rows that cannot become a prompt of at most `max_prompt_tokens` tokens, or lack the responses that
    `recorded` asks for."""

    tokenizer: Tokenizer
    max_prompt_tokens: int
    recorded: Recorded | None = None

    def check(self, row: Row) -> None:
        """Raise `BadRow` for an empty or over-long prompt, for one that the tokenizer refuses, and for missing,
        empty or over-long responses."""
        self._check_prompt(row)
        if self.recorded is not None:
            self._check_responses(row, self.recorded)

    def _check_responses(self, row: Row, recorded: Recorded) -> None:
        try:
            responses = recorded.tokens(row.to_prompt("row", 0), self.tokenizer)
        except DataError as error:
            raise BadRow("no_response", f"{row.where}: {error}") from error
        longest = max(map(len, responses))
        if longest > recorded.max_tokens:
            raise BadRow(
                "over_long",
                f"{row.where}: a response has {longest} tokens with its end token, run.max_response_tokens is "
                f"{recorded.max_tokens}; raise the limit, or set data.on_bad_row to 'skip'",
            )

    def _check_prompt(self, row: Row) -> None:
        last = row.messages[-1]["content"] if row.messages else row.text
        if not (last or "").strip():
            raise BadRow("empty", f"{row.where}: the prompt is empty")
        try:
            tokens = len(self.tokenizer.render(row.to_prompt("row", 0)))
        except DataError as error:
            raise BadRow("unrenderable", f"{row.where}: {error}") from error
        if tokens == 0:
            raise BadRow("empty", f"{row.where}: the prompt has no tokens")
        if tokens > self.max_prompt_tokens:
            raise BadRow(
                "over_long",
                f"{row.where}: the prompt has {tokens} tokens, run.max_prompt_tokens is {self.max_prompt_tokens}; "
                "raise the limit, shorten the prompt, or set data.on_bad_row to 'skip'",
            )


def with_system(
    system_prompt: str | None, messages: tuple[dict[str, str], ...] | None, text: str | None
) -> tuple[tuple[dict[str, str], ...] | None, str | None]:
    """Put the system prompt before the first message, unless the row brings its own; before text with a blank line."""
    if system_prompt is None:
        return messages, text
    if messages is not None:
        if messages[0]["role"] == "system":
            return messages, None
        return ({"role": "system", "content": system_prompt}, *messages), None
    return None, f"{system_prompt}\n\n{text}"


def stable_seed(seed: int) -> int:
    """Any integer as the unsigned 64-bit number that NumPy's SeedSequence wants."""
    return seed % 2**64


def digest_of(value: Json) -> str:
    """blake2b-128 of the canonical JSON text of a value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

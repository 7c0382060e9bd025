"""Rows from records that somebody else wrote: a line of JSON, a row of a table, what an own source returns.

A record has `prompt` (text) or `messages` (list of {"role", "content"}), and optionally `label` (any JSON), `metadata`
(object), and recorded responses (text): `response`, or `chosen` and `rejected`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from relax.data.recorded import RESPONSES
from relax.data.rows import BadRow, Row, RowCheck, SkipLog, digest_of, with_system
from relax.types import DataError, Json

KEYS = ("prompt", "messages", "label", "metadata", "response", "chosen", "rejected")

Read = Callable[[], Any]
"""Gives one record, or raises `BadRow` for one that cannot be read at all."""


class RecordRows:
    """The usable rows of a fixed list of records, all checked at the start. A row keeps the index that its record
    has in the list, whatever was skipped."""

    checked = True

    def __init__(
        self,
        name: str,
        records: Iterable[tuple[int, str, Read]],
        identity: Mapping[str, Json],
        check: RowCheck,
        *,
        place: str,
        on_bad_row: Literal["fail", "skip"] = "fail",
        system_prompt: str | None = None,
    ) -> None:
        """records: (index, where, read) each. identity: what makes the content this content. place: for messages.

        Raises `DataError` when there is no usable row and, unless bad rows are skipped, for the first bad one.
        """
        self.name = name
        self.skips = SkipLog()
        self._system_prompt = system_prompt
        self._rows: list[Row] = []
        for index, where, read in records:
            try:
                row = parse_record(read(), index, where, system_prompt)
                check.check(row)
            except BadRow as bad:
                if on_bad_row == "fail":
                    raise
                self.skips.add(bad)
            else:
                self._rows.append(row)
        if not self._rows:
            first = f"; the first: {self.skips.reasons[0]}" if self.skips.reasons else ""
            raise DataError(f"{place} has no usable row ({self.skips.total} skipped){first}")
        self._identity = dict(identity)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, position: int) -> Row:
        return self._rows[position]

    def identity(self) -> dict[str, Json]:
        return {
            **self._identity,
            "usable": digest_of([row.index for row in self._rows]),
            "system_prompt": self._system_prompt,
        }


def rename(record: Any, columns: Mapping[str, str]) -> Any:
    """The record with the keys that `columns` (key -> column) names; without columns as it is. Columns that none
    names go into the metadata."""
    if not columns or not isinstance(record, dict):
        return record
    used = set(columns.values())
    named = {key: record[column] for key, column in columns.items() if column in record}
    own = named.pop("metadata", None)
    rest = {column: value for column, value in record.items() if column not in used}
    metadata = {**rest, **own} if isinstance(own, dict) else rest
    return {**named, **({"metadata": metadata} if metadata else {})}


def source_name(path: Path) -> str:
    """Group ids use ":" and "/", evaluation sources begin with "eval-": none of them may come from a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]|(?<=^eval)-", "_", path.stem)


def parse_record(data: Any, index: int, where: str, system_prompt: str | None) -> Row:
    """One record as a row. Raises `BadRow` that names the key and what is wrong with it."""
    if not isinstance(data, dict):
        raise BadRow("not_an_object", f"{where}: expected a JSON object, found {type(data).__name__}")
    _check_keys(data, where)
    metadata = data.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise BadRow("malformed", f"{where}: `metadata` must be an object, not {type(metadata).__name__}")
    messages, text = _messages(data.get("messages"), where), data.get("prompt")
    if text is not None and not isinstance(text, str):
        raise BadRow("malformed", f"{where}: `prompt` must be a string; chat messages go under `messages`")
    if text is not None and not text.strip():
        raise BadRow("empty", f"{where}: the prompt is empty")
    messages, text = with_system(system_prompt, messages, text)
    responses = _responses(data, where)
    if responses:
        metadata = {**(metadata or {}), RESPONSES: responses}
    return Row(index, where, messages, text, data.get("label"), metadata or {})


def _responses(data: dict[str, Any], where: str) -> list[str]:
    given = [key for key in ("response", "chosen", "rejected") if key in data]
    if given not in ([], ["response"], ["chosen", "rejected"]):
        raise BadRow("malformed", f"{where}: give `response`, or `chosen` and `rejected`; found {', '.join(given)}")
    for key in given:
        if not isinstance(data[key], str):
            raise BadRow("malformed", f"{where}: `{key}` must be a string, not {type(data[key]).__name__}")
    return [data[key] for key in given]


def _check_keys(data: dict[str, Any], where: str) -> None:
    for key in data:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.6)
            hint = f"did you mean '{near[0]}'?" if near else "put more fields under `metadata`"
            raise BadRow("unknown_key", f"{where}: unknown key '{key}': {hint} (known: {', '.join(KEYS)})")
    given = [key for key in ("prompt", "messages") if data.get(key) is not None]
    if not given:
        raise BadRow("no_prompt", f"{where}: the row has neither `prompt` nor `messages`")
    if len(given) == 2:
        raise BadRow("malformed", f"{where}: the row has both `prompt` and `messages`; give one of them")


def _messages(value: Any, where: str) -> tuple[dict[str, str], ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise BadRow("malformed", f"{where}: `messages` must be a non-empty list")
    for number, message in enumerate(value):
        if (
            not isinstance(message, dict)
            or not {"role", "content"} <= set(message)
            or not all(isinstance(part, str) for part in message.values())
        ):
            raise BadRow(
                "malformed", f'{where}: message {number} must be {{"role": text, "content": text}}, not {message!r}'
            )
    return tuple(value)

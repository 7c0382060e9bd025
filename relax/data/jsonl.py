"""Prompts from a JSON-lines file, all checked at the start.

A line is an object with `prompt` (text) or `messages` (list of {"role", "content"}), and optionally
`label` (any JSON) and `metadata` (object). Blank lines are passed over.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal, NoReturn

from relax.data.rows import BadRow, Row, RowCheck, SkipLog, digest_of, with_system
from relax.types import DataError, Json

_KEYS = ("prompt", "messages", "label", "metadata")


class JsonlRows:
    """The usable rows of a file. A row's index is its line number counted from 0, whatever was skipped."""

    checked = True

    def __init__(
        self,
        path: Path,
        check: RowCheck,
        *,
        on_bad_row: Literal["fail", "skip"] = "fail",
        system_prompt: str | None = None,
    ) -> None:
        """Read and check the file. Raises `DataError` for an unreadable file, one without a usable row,
        and, unless bad rows are skipped, for the first bad row, with file and line."""
        # Group ids use ":" and "/", evaluation sources begin with "eval-": none of them may come from a file name.
        self.name = re.sub(r"[^A-Za-z0-9_.-]|(?<=^eval)-", "_", path.stem)
        self.skips = SkipLog()
        self._system_prompt = system_prompt
        self._rows: list[Row] = []
        content = _read(path)
        for index, line in enumerate(content.split(b"\n")):
            if not line.strip():
                continue
            try:
                row = _parse(line, index, f"{path}:{index + 1}", system_prompt)
                check.check(row)
            except BadRow as bad:
                if on_bad_row == "fail":
                    raise
                self.skips.add(bad)
            else:
                self._rows.append(row)
        if not self._rows:
            first = f"; the first: {self.skips.reasons[0]}" if self.skips.reasons else ""
            raise DataError(f"{path} has no usable row ({self.skips.total} skipped){first}")
        self._digest = hashlib.blake2b(content, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, position: int) -> Row:
        return self._rows[position]

    def identity(self) -> dict[str, Json]:
        return {
            "kind": "jsonl",
            "content": self._digest,
            "usable": digest_of([row.index for row in self._rows]),
            "system_prompt": self._system_prompt,
        }


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the prompt file {path}: {error.strerror or error}") from error
    return content.removeprefix(b"\xef\xbb\xbf")


def _parse(line: bytes, index: int, where: str, system_prompt: str | None) -> Row:
    try:
        data = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:
        raise BadRow("broken", f"{where}: not valid JSON: {error}") from error
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
    return Row(index, where, messages, text, data.get("label"), metadata or {})


def _check_keys(data: dict[str, Any], where: str) -> None:
    for key in data:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.6)
            hint = f"did you mean '{near[0]}'?" if near else "put more fields under `metadata`"
            raise BadRow("unknown_key", f"{where}: unknown key '{key}': {hint} (known: {', '.join(_KEYS)})")
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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")

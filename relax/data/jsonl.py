"""Prompts from a JSON-lines file, all checked at the start: a record a line (`relax.data.records`).

Blank lines are passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from relax.data.records import Read, RecordRows, rename, source_name
from relax.data.rows import BadRow, RowCheck
from relax.types import DataError


class JsonlRows(RecordRows):
    """The usable rows of a file. A row's index is its line number counted from 0, whatever was skipped."""

    def __init__(
        self,
        path: Path,
        check: RowCheck,
        *,
        columns: Mapping[str, str] | None = None,
        on_bad_row: Literal["fail", "skip"] = "fail",
        system_prompt: str | None = None,
    ) -> None:
        """Read and check the file. Raises `DataError` for an unreadable file, one without a usable row,
        and, unless bad rows are skipped, for the first bad row, with file and line."""
        content = _read(path)
        super().__init__(
            source_name(path),
            _records(path, content, columns or {}),
            {
                "kind": "jsonl",
                "content": hashlib.blake2b(content, digest_size=16).hexdigest(),
                "columns": dict(columns or {}),
            },
            check,
            place=str(path),
            on_bad_row=on_bad_row,
            system_prompt=system_prompt,
        )


def _records(path: Path, content: bytes, columns: Mapping[str, str]) -> Iterator[tuple[int, str, Read]]:
    for index, line in enumerate(content.split(b"\n")):
        if line.strip():
            where = f"{path}:{index + 1}"
            yield index, where, lambda line=line, where=where: rename(_parse(line, where), columns)  # type: ignore[misc]


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the prompt file {path}: {error.strerror or error}") from error
    return content.removeprefix(b"\xef\xbb\xbf")


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:
        raise BadRow("broken", f"{where}: not valid JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")

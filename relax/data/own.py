"""Prompts from a user's own class."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from relax.data.records import Read, RecordRows
from relax.data.rows import BadRow, RowCheck, digest_of
from relax.plugins import PluginError, load_class, origin
from relax.types import Json


class OwnSource(Protocol):
    """What a user writes: a fixed sequence of records, built as `Source(params, seed, held_out)`.

    Equal arguments give equal records. `held_out`: the records to evaluate on, which training must not see.
    """

    def __init__(self, params: Mapping[str, Any], seed: int, held_out: bool) -> None: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Json]:
        """A record as in `relax.data.records`."""
        ...


class OwnRows(RecordRows):
    """The usable records of an own class, all read and checked at the start."""

    def __init__(
        self,
        spec: str,
        params: Mapping[str, Any],
        seed: int,
        check: RowCheck,
        *,
        held_out: bool,
        base: Path | None = None,
        on_bad_row: Literal["fail", "skip"] = "fail",
        system_prompt: str | None = None,
    ) -> None:
        """Raises `PluginError` for a class that is not there, cannot be built so, or lacks a method; `DataError` as
        `RecordRows`."""
        found = load_own_source(spec, base)
        try:
            source = found(dict(params), seed, held_out)
            size = len(source)
        except Exception as error:
            # User code runs here and may raise anything; the cause stays chained.
            raise PluginError(
                f"data source {found.__name__} in {origin(found)} cannot be built: {type(error).__name__}: {error}"
            ) from error
        records = [(index, f"{spec}, record {index}", _reader(source, index, spec)) for index in range(size)]
        contents = [_try(read) for _, _, read in records]
        super().__init__(
            found.__name__,
            _given(records, contents),
            {"kind": "own", "content": digest_of([repr(c) if isinstance(c, BadRow) else c for c in contents])},
            check,
            place=spec,
            on_bad_row=on_bad_row,
            system_prompt=system_prompt,
        )


def load_own_source(spec: str, base: Path | None) -> type:
    """The class, its interface checked. Raises `PluginError`."""
    found = load_class(spec, base)
    for method in ("__len__", "__getitem__"):
        if not callable(inspect.getattr_static(found, method, None)):
            raise PluginError(f"data source {found.__name__} in {origin(found)} has no `{method}`")
    try:
        inspect.signature(found).bind({}, 0, False)
    except TypeError as error:
        raise PluginError(
            f"data source {found.__name__} in {origin(found)} is built as {found.__name__}"
            f"{inspect.signature(found)}: it must take (params, seed, held_out)"
        ) from error
    return found


def _reader(source: Any, index: int, spec: str) -> Read:
    def read() -> Any:
        try:
            record = source[index]
        except Exception as error:
            # User code runs here and may raise anything; the cause stays chained.
            raise BadRow("broken", f"{spec}, record {index}: {type(error).__name__}: {error}") from error
        return dict(record) if isinstance(record, Mapping) else record

    return read


def _try(read: Read) -> Any:
    try:
        return read()
    except BadRow as bad:
        return bad


def _given(records: list[tuple[int, str, Read]], contents: list[Any]) -> Iterator[tuple[int, str, Read]]:
    for (index, where, _), content in zip(records, contents, strict=True):
        yield index, where, lambda content=content: _raise_or_return(content)  # type: ignore[misc]


def _raise_or_return(content: Any) -> Any:
    if isinstance(content, BadRow):
        raise content
    return content

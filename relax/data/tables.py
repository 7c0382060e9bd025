"""Prompts from a Parquet file or from a folder that Hugging Face `datasets` saved: a record a row.

Read through pyarrow (extra `data`); `datasets` itself is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from relax.data.records import Read, RecordRows, rename, source_name
from relax.data.rows import RowCheck, digest_of
from relax.types import DataError, Json


class TableRows(RecordRows):
    """The usable rows of a table. A row's index is its position in the file, whatever was skipped."""

    def __init__(
        self,
        kind: Literal["parquet", "dataset"],
        path: Path,
        check: RowCheck,
        *,
        columns: Mapping[str, str],
        split: str | None = None,
        on_bad_row: Literal["fail", "skip"] = "fail",
        system_prompt: str | None = None,
    ) -> None:
        """Raises `DataError` as `RecordRows`, and for a file that cannot be read or lacks a column."""
        records = _read(kind, path, split)
        wanted = set(columns.values())
        if records and (missing := sorted(wanted - set(records[0]))):
            raise DataError(f"{path} has no column {', '.join(missing)}; it has {', '.join(records[0])}")
        super().__init__(
            source_name(path),
            _renamed(path, records, columns),
            {"kind": kind, "content": digest_of(records), "columns": dict(columns)},
            check,
            place=str(path),
            on_bad_row=on_bad_row,
            system_prompt=system_prompt,
        )


def _renamed(path: Path, records: list[dict[str, Json]], columns: Mapping[str, str]) -> Iterator[tuple[int, str, Read]]:
    for index, record in enumerate(records):
        yield index, f"{path}, row {index}", lambda record=record: rename(record, columns)  # type: ignore[misc]


def _read(kind: str, path: Path, split: str | None) -> list[dict[str, Json]]:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow: pip install 'relax-rl[data]'") from error
    try:
        table = _parquet(path) if kind == "parquet" else _dataset(path, split)
    except (OSError, pyarrow.ArrowException, KeyError, ValueError) as error:
        raise DataError(f"cannot read {path} as {kind}: {error}") from error
    records: list[dict[str, Json]] = table.to_pylist()
    return [{key: value for key, value in record.items() if value is not None} for record in records]


def _parquet(path: Path) -> Any:
    from pyarrow import parquet

    return parquet.read_table(path)


def _dataset(folder: Path, split: str | None) -> Any:
    """What `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote: Arrow streams named in state.json."""
    import pyarrow

    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        if split is None or split not in splits:
            raise ValueError(f"data.split must be one of {', '.join(splits)}, not {split!r}")
        folder = folder / split
    elif split is not None:
        raise ValueError("the folder holds a single split: leave data.split out")
    state = json.loads((folder / "state.json").read_text())
    tables = []
    for entry in state["_data_files"]:
        with pyarrow.memory_map(str(folder / entry["filename"])) as source:
            tables.append(pyarrow.ipc.open_stream(source).read_all())
    return pyarrow.concat_tables(tables)

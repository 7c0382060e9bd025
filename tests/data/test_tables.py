from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from relax.config.data import DataConfig
from relax.data.rows import RowCheck
from relax.data.source import build_source
from relax.data.tables import TableRows
from relax.data.tokenizer import Tokenizer
from relax.types import DataError

RECORDS = [{"question": f"{n}+1", "answer": str(n + 1), "level": n} for n in range(5)]
COLUMNS = {"prompt": "question", "label": "answer"}


def save_dataset(folder: Path, records: list[dict[str, Any]]) -> None:
    """As `Dataset.save_to_disk` lays it out: Arrow streams, and state.json that names them."""
    folder.mkdir(parents=True)
    names = []
    for part in (records[:2], records[2:]):
        table = pyarrow.Table.from_pylist(part)
        names.append(f"data-{len(names):05d}-of-00002.arrow")
        with pyarrow.OSFile(str(folder / names[-1]), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "sums.parquet")
    save_dataset(tmp_path / "one", RECORDS)
    save_dataset(tmp_path / "two" / "train", RECORDS)
    save_dataset(tmp_path / "two" / "test", RECORDS[:1])
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "path", "split"),
    [("parquet", "sums.parquet", None), ("dataset", "one", None), ("dataset", "two", "train")],
)
def test_rows_of_a_table_are_prompts(plain: Tokenizer, folder: Path, kind: Any, path: str, split: str | None) -> None:
    rows = TableRows(kind, folder / path, RowCheck(plain, 9), columns=COLUMNS, split=split)
    assert [(rows.row(i).text, rows.row(i).label) for i in range(len(rows))] == [
        (r["question"], r["answer"]) for r in RECORDS
    ]
    assert rows.row(3).metadata == {"level": 3}, "columns that nobody named are kept"
    assert rows.row(3).where == f"{folder / path}, row 3"


@pytest.mark.parametrize(
    ("kind", "path", "split", "words"),
    [
        ("parquet", "no.parquet", None, "cannot read"),
        ("dataset", "sums.parquet", None, "cannot read"),
        ("dataset", "two", None, "data.split must be one of train, test"),
        ("dataset", "two", "dev", "data.split must be one of train, test, not 'dev'"),
        ("dataset", "one", "train", "leave data.split out"),
    ],
)
def test_a_table_that_cannot_be_read_says_why(
    plain: Tokenizer, folder: Path, kind: Any, path: str, split: str | None, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        TableRows(kind, folder / path, RowCheck(plain, 9), columns=COLUMNS, split=split)


def test_a_missing_column_is_named(plain: Tokenizer, folder: Path) -> None:
    with pytest.raises(DataError, match="has no column text; it has question, answer, level"):
        TableRows("parquet", folder / "sums.parquet", RowCheck(plain, 9), columns={"prompt": "text"})


def test_a_bad_row_is_named_by_its_number_or_skipped(plain: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "ok"}, {"prompt": None}, {"prompt": "fine"}]), path)
    with pytest.raises(DataError, match=r"bad\.parquet, row 1: the row has neither"):
        TableRows("parquet", path, RowCheck(plain, 9), columns={})
    rows = TableRows("parquet", path, RowCheck(plain, 9), columns={}, on_bad_row="skip")
    assert [rows.row(i).index for i in range(len(rows))] == [0, 2]
    assert rows.skips.counts == {"no_prompt": 1}


def test_a_source_over_a_table_has_an_exact_cursor(plain: Tokenizer, folder: Path) -> None:
    """behaviour: B12"""
    config = DataConfig(kind="parquet", path=str(folder / "sums.parquet"), columns=COLUMNS)
    source = build_source(config, 1, plain, 9)
    drawn = [source.next() for _ in range(3)]
    state, rest = source.state_dict(), [source.next() for _ in range(5)]
    again = build_source(config, 1, plain, 9)
    again.load_state_dict(state)
    assert [again.next() for _ in range(5)] == rest and drawn[0] is not None

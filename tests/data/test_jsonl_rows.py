from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax.data.jsonl import JsonlRows
from relax.data.rows import RowCheck
from relax.data.tokenizer import Tokenizer
from relax.types import DataError

GOOD = '{"prompt": "1+1", "label": 2, "metadata": {"id": "a"}}'
CASES = {
    '{"prompt": "x"': ("broken", "not valid JSON: "),
    '{"prompt": "x", "label": NaN}': ("broken", "NaN is not a JSON number"),
    '["x"]': ("not_an_object", "expected a JSON object, found list"),
    '{"label": 3}': ("no_prompt", "the row has neither `prompt` nor `messages`"),
    '{"prompt": null}': ("no_prompt", "the row has neither `prompt` nor `messages`"),
    '{"prompt": ""}': ("empty", "the prompt is empty"),
    '{"prompt": "  "}': ("empty", "the prompt is empty"),
    '{"prompt": 3}': ("malformed", "`prompt` must be a string"),
    '{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}': ("malformed", "both `prompt` and `messages`"),
    '{"messages": []}': ("malformed", "`messages` must be a non-empty list"),
    '{"messages": [{"role": "user"}]}': ("malformed", "message 0 must be "),
    '{"messages": [{"role": "user", "content": [1]}]}': ("malformed", "message 0 must be "),
    '{"messages": [{"role": "user", "content": ""}]}': ("empty", "the prompt is empty"),
    '{"prompt": "x", "metadata": 3}': ("malformed", "`metadata` must be an object, not int"),
    '{"prompt": "x", "lable": 3}': ("unknown_key", "unknown key 'lable': did you mean 'label'?"),
    '{"prompt": "x", "answer": 3}': ("unknown_key", "unknown key 'answer': put more fields under `metadata`"),
    '{"prompt": "0123456789"}': ("over_long", "the prompt has 10 tokens, run.max_prompt_tokens is 9"),
    '{"prompt": "\u00e9"}': ("unrenderable", "cannot encode '\\xe9'"),
    '{"messages": [{"role": "user", "content": "x"}]}': ("unrenderable", "has no chat template"),
}


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("line", CASES)
def test_a_bad_line_fails_with_file_line_and_fault(plain: Tokenizer, tmp_path: Path, line: str) -> None:
    path = write(tmp_path, GOOD, "", line)
    with pytest.raises(DataError) as caught:
        JsonlRows(path, RowCheck(plain, 9))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert CASES[line][1] in str(caught.value)


@pytest.mark.parametrize("line", CASES)
def test_a_bad_line_is_skipped_counted_and_its_reason_kept(plain: Tokenizer, tmp_path: Path, line: str) -> None:
    path = write(tmp_path, line, GOOD)
    rows = JsonlRows(path, RowCheck(plain, 9), on_bad_row="skip")
    assert [rows.row(i).text for i in range(len(rows))] == ["1+1"]
    assert rows.skips.counts == {CASES[line][0]: 1}
    assert rows.skips.reasons[0].startswith(f"{path}:1: ") and CASES[line][1] in rows.skips.reasons[0]


def test_a_good_row_keeps_label_metadata_and_line(plain: Tokenizer, tmp_path: Path) -> None:
    row = JsonlRows(write(tmp_path, "", GOOD), RowCheck(plain, 9)).row(0)
    assert (row.index, row.text, row.label, row.metadata) == (1, "1+1", 2, {"id": "a"})


def test_bytes_that_are_no_utf8_fail_with_the_line(plain: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"data.jsonl:2: not valid JSON: .*utf-8"):
        JsonlRows(path, RowCheck(plain, 9))


def test_a_byte_order_mark_and_windows_line_ends_are_read(plain: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n" + GOOD.encode() + b"\r\n")
    assert len(JsonlRows(path, RowCheck(plain, 9))) == 2


def test_a_missing_file_is_named(plain: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the prompt file .*no.jsonl: No such file"):
        JsonlRows(tmp_path / "no.jsonl", RowCheck(plain, 9))


@pytest.mark.parametrize("lines", [[""], ["[]", "[]"]])
def test_a_file_without_a_usable_row_is_refused(plain: Tokenizer, tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(DataError, match=r"data.jsonl has no usable row"):
        JsonlRows(write(tmp_path, *lines), RowCheck(plain, 9), on_bad_row="skip")


def test_messages_get_the_system_prompt_unless_they_bring_one(chat: Tokenizer, tmp_path: Path) -> None:
    user, own = {"role": "user", "content": "x"}, {"role": "system", "content": "own"}
    path = write(tmp_path, json.dumps({"messages": [user]}), json.dumps({"messages": [own, user]}))
    rows = JsonlRows(path, RowCheck(chat, 99), system_prompt="be brief")
    assert rows.row(0).messages == ({"role": "system", "content": "be brief"}, user)
    assert rows.row(1).messages == (own, user)

from __future__ import annotations

import pytest

from relax.data.toy import ToyRows, is_held_out
from relax.types import DataError

WANT = {"reverse": lambda s: s[::-1], "copy": lambda s: s, "sort": lambda s: "".join(sorted(s))}


@pytest.mark.parametrize("task", ["reverse", "copy", "sort"])
def test_a_toy_prompt_is_payload_and_mark_and_its_label_the_answer(task: str) -> None:
    rows = ToyRows(task, {"length": 4, "alphabet": "abcd"}, 30, 1)
    for i in range(30):
        row = rows.row(i)
        assert row.text is not None and len(row.text) == 5 and row.text.endswith(">")
        assert set(row.text[:-1]) <= set("abcd")
        assert row.label == WANT[task](row.text[:-1])


def test_toy_rows_are_functions_of_seed_and_index() -> None:
    """Golden rows: a change here would change every saved run."""
    assert [ToyRows("copy", {}, 9, 1).row(i).label for i in (0, 1, 8)] == ["962", "244", "470"]
    assert ToyRows("copy", {}, 9, 1).row(5) == ToyRows("copy", {}, 99, 1).row(5)
    assert [ToyRows("copy", {}, 20, s).row(3).label for s in (1, 2)] != 2 * [ToyRows("copy", {}, 20, 1).row(3).label]


def test_training_and_held_out_payloads_share_nothing() -> None:
    train = {ToyRows("copy", {}, 500, 1).row(i).label for i in range(500)}
    held = {ToyRows("copy", {}, 500, 1, held_out=True).row(i).label for i in range(500)}
    assert not train & held
    assert all(map(is_held_out, held))


def test_a_domain_too_small_to_split_is_drawn_whole() -> None:
    params = {"length": 1, "alphabet": "0123456789"}
    for held_out in (False, True):
        rows = ToyRows("copy", params, 300, 1, held_out=held_out)
        assert {rows.row(i).label for i in range(300)} == set("0123456789")


@pytest.mark.parametrize(
    ("task", "params", "message"),
    [
        ("revers", {}, "unknown toy task 'revers' in data.task: known are reverse, copy, sort"),
        ("copy", {"lenght": 3}, "unknown key 'lenght' in data.params of a toy task: did you mean 'length'"),
        ("copy", {"length": 0}, "data.params.length must be a whole number of at least 1, not 0"),
        ("copy", {"length": "3"}, "data.params.length must be a whole number of at least 1, not '3'"),
        ("copy", {"alphabet": "aa"}, "at least 2 different characters, not 'aa'"),
        ("copy", {"alphabet": "a>"}, "may not contain '>'"),
    ],
)
def test_bad_toy_settings_are_named(task: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ToyRows(task, params, 5, 1)

"""Where two runs part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dump_maker import change_file, make_dumps

from relax.dump.diff import diff
from relax.dump.files import read_dump, step_folder, write_dump
from relax.dump.record import DumpError

ROW = "toy:0:202/1/0"
"""Of the second step."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    return make_dumps(tmp_path_factory.mktemp("recorded"), {"name": "grpo", "kl": {"coef": 0.1}}, steps=3).run_dir


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(recorded, tmp_path / "copy")


def one_more(array: Any, position: int, by: float = 1) -> Any:
    other = array.copy()
    other[position] += by
    return other


def test_a_run_equals_its_copy_in_whatever_order_its_rows_are(recorded: Path, copy: Path) -> None:
    folder = step_folder(copy / "dumps", 2)
    dump = read_dump(folder)
    write_dump(replace(dump, rows=dict(reversed(dump.rows.items()))), folder)
    found = diff(recorded, copy, 0.0)
    assert found.first is None and found.steps == (1, 2, 3) and found.source == "dumps"


@pytest.mark.parametrize(
    ("name", "change", "position", "gap"),
    [
        ("prompt", lambda value: {**value, "label": "1"}, None, float("inf")),
        ("tokens", lambda value: one_more(value, 5), 5, 1.0),
        ("versions", lambda value: one_more(value, 4), 4, 1.0),
        ("rollout_logprobs", lambda value: one_more(value, 6, 0.5), 6, 0.5),
        ("reward", lambda value: value + 0.125, None, 0.125),
        ("ref_logprobs", lambda value: one_more(value, 4, 0.25), 4, 0.25),
        ("advantages", lambda value: one_more(value, 4, 0.25), 4, 0.25),
        ("trainer_logprobs", lambda value: one_more(value, 5, 1e-3), 5, 1e-3),
        ("loss_terms", lambda value: one_more(value, 5, 1e-3), 5, 1e-3),
    ],
)
def test_one_changed_value_is_named_with_step_row_and_position(
    name: str, change: Callable[[Any], Any], position: int | None, gap: float, recorded: Path, copy: Path
) -> None:
    folder = step_folder(copy / "dumps", 2)
    change_file(folder, ROW, name, change(read_dump(folder).rows[ROW].values[name]))
    found = diff(recorded, copy, 1e-6)
    assert found.step == 2 and found.first is not None and found.first.field == name
    place = found.first.first
    assert place is not None and (place.row_id, place.position) == (ROW, position) and found.first.differing == 1
    assert place.gap == pytest.approx(gap, rel=1e-3)
    if np.isfinite(gap):
        assert diff(recorded, copy, 10.0).first is None, "within the tolerance"


def test_the_field_that_comes_first_in_the_pipeline_is_named_and_the_others_follow(recorded: Path, copy: Path) -> None:
    folder = step_folder(copy / "dumps", 2)
    for name in ("loss_terms", "versions"):
        change_file(folder, ROW, name, one_more(read_dump(folder).rows[ROW].values[name], 4))
    later = step_folder(copy / "dumps", 3)
    change_file(later, "toy:0:300/0/0", "tokens", one_more(read_dump(later).rows["toy:0:300/0/0"].values["tokens"], 4))
    found = diff(recorded, copy, 1e-6)
    assert [field.field for field in found.fields if not field.equal] == ["versions", "loss_terms"]
    assert found.step == 2


def test_a_longer_answer_parts_where_the_shorter_one_ends(recorded: Path, copy: Path) -> None:
    folder = step_folder(copy / "dumps", 2)
    tokens = read_dump(folder).rows[ROW].values["tokens"]
    dump = read_dump(folder)
    row = dump.rows[ROW]
    short = {name: v[:-1] if isinstance(v, np.ndarray) else v for name, v in row.values.items()}
    write_dump(replace(dump, rows={**dump.rows, ROW: replace(row, values=short)}), folder)
    first = diff(recorded, copy, 0.0).first
    assert first is not None and first.field == "tokens" and first.first is not None
    assert first.first.position == len(tokens) - 1 and first.first.right == "absent"


def test_a_row_that_one_side_lacks_is_named(recorded: Path, copy: Path) -> None:
    folder = step_folder(copy / "dumps", 1)
    dump = read_dump(folder)
    rows = {row_id: row for row_id, row in dump.rows.items() if row_id != "toy:0:101/1/0"}
    write_dump(replace(dump, rows=rows), folder)
    found = diff(recorded, copy, 0.0)
    assert found.first is not None and found.first.field == "rows" and found.first.first is not None
    assert found.first.first.row_id == "toy:0:101/1/0" and found.first.first.right == "absent"


def test_one_changed_weight_shows_in_the_digest_after_the_step(recorded: Path, tmp_path: Path) -> None:
    """Another learning rate: the first step computes the same and ends in other weights."""
    other = make_dumps(tmp_path, {"name": "grpo", "kl": {"coef": 0.1}}, steps=3, lr=1e-3)
    found = diff(recorded, other.run_dir, 1e-6)
    assert found.step == 1
    assert [field.field for field in found.fields if not field.equal] == ["lr", "weights_after"]
    assert found.settings == ("actor.optim.lr: 0.003 / 0.001",)


def metrics(run_dir: Path, **changes: float) -> Path:
    run_dir.mkdir(exist_ok=True)
    lines = [
        {"step": float(step), "reward_mean": step / 10, "entropy": 1.0, "loss": 0.5, "grad_norm": 0.1, "step_s": 0.3}
        for step in (1, 2, 3)
    ]
    lines[1] |= changes
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def test_without_dumps_the_metrics_are_compared_and_times_are_not(tmp_path: Path) -> None:
    same = metrics(tmp_path / "a"), metrics(tmp_path / "b", step_s=9.0)
    assert diff(*same, 0.0).first is None
    found = diff(same[0], metrics(tmp_path / "c", loss=0.75, reward_mean=0.3, grad_norm=0.2), 0.0)
    assert found.source == "metrics.jsonl" and found.step == 2
    assert [field.field for field in found.fields if not field.equal] == ["reward_mean", "loss", "grad_norm"]


def test_metrics_of_a_step_before_the_first_dump_are_told(recorded: Path, copy: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.rmtree(step_folder(copy / "dumps", step))
    change_file(step_folder(copy / "dumps", 3), "toy:0:300/0/0", "reward", 5.0)
    left = shutil.copytree(recorded, tmp_path / "left")
    metrics(left)
    metrics(copy, loss=0.75)
    found = diff(left, copy, 0.0)
    assert found.step == 3 and found.first is not None and found.first.field == "reward"
    assert any("step 2 already: loss" in note for note in found.notes)


def test_nothing_to_compare_is_an_error_that_says_what_to_do(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="relax dump FILE"):
        diff(recorded, tmp_path, 0.0)
    with pytest.raises(DumpError, match="is no folder"):
        diff(recorded, tmp_path / "none", 0.0)

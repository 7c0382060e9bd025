"""Dumps on disk, and the commands over them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dump_maker import Made, change_file, make_dumps
from typer.testing import CliRunner, Result

from relax.cli.main import app
from relax.config.dump import DumpConfig
from relax.config.file import ConfigError, load_run_file
from relax.dump.files import find_dumps, read_dump
from relax.dump.record import DumpError

ROW = "toy:0:101/1/0"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_dumps(tmp_path_factory.mktemp("recorded"), {"name": "grpo", "kl": {"coef": 0.1}}, steps=2)


@pytest.fixture
def folder(recorded: Made, tmp_path: Path) -> Path:
    return shutil.copytree(recorded.folder(1), tmp_path / "dump")


def relax(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_dump_holds_what_the_step_read_and_computed(recorded: Made) -> None:
    assert list(find_dumps(recorded.run_dir)) == list(find_dumps(recorded.run_dir / "dumps")) == [1, 2]
    dump = read_dump(recorded.folder(1))
    row = dump.rows[ROW]
    asked, said = row.values["prompt_text"], row.values["response_text"]
    assert row.values["prompt"]["text"] == asked and asked.endswith(">") and len(said) == 3
    assert row.array("tokens").dtype == np.int32 and row.array("loss_mask").dtype == np.bool_
    advantages, terms = row.array("advantages"), row.array("loss_terms")
    assert len(advantages) == len(terms) == len(row.array("tokens"))
    assert not advantages[~row.array("loss_mask")].any()
    summed = sum(float(r.array("loss_terms").sum()) for r in dump.rows.values())
    assert summed / len(dump.rows) == pytest.approx(dump.result["loss"], abs=1e-6), "the mean over rows"
    assert {row.portion for row in dump.rows.values()} == {0, 1}
    assert set(dump.code) >= {"source", "torch", "transformers"} and dump.config["run"]["seed"] == 1
    assert dump.digests["weights_before"] != dump.digests["weights_after"]
    assert read_dump(recorded.folder(2)).digests["weights_before"] == dump.digests["weights_after"]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda folder: (folder / "rows.safetensors").unlink(), "rows.safetensors is missing"),
        (lambda folder: damage(folder / "rows.safetensors"), "rows.safetensors is damaged"),
        (lambda folder: damage(folder / "model" / "model.safetensors"), "model.safetensors is damaged"),
        (lambda folder: (folder / "state" / "state.json").unlink(), "state.json is missing"),
        (lambda folder: (folder / "dump.json").unlink(), "dump.json is missing"),
        (lambda folder: (folder / "dump.json").write_text("{"), "cannot be read"),
        (lambda folder: edit(folder, schema_version=99), "schema version 99, this build reads 1"),
        (lambda folder: edit(folder, step="x"), "step: "),
    ],
)
def test_a_damaged_dump_or_one_of_another_schema_is_refused_with_the_file(fault: Any, words: str, folder: Path) -> None:
    fault(folder)
    with pytest.raises(DumpError, match=words):
        read_dump(folder)
    assert relax("replay", folder).exit_code == 2 or not (folder / "dump.json").exists()


def edit(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / "dump.json").read_text())
    (folder / "dump.json").write_text(json.dumps({**manifest, **changes}))


def test_a_dump_that_cannot_be_written_is_counted_and_training_goes_on(tmp_path: Path) -> None:
    """behaviour: B47"""
    (tmp_path / "dumps").write_text("a file where the folder should be")
    made = make_dumps(tmp_path, {"name": "grpo"}, steps=2)
    assert made.reporter.counts == {"dumps_failed": 2} and str(tmp_path / "dumps") in made.reporter.facts["dump_error"]


@pytest.mark.parametrize("kib", [100, 600, 804, 808, 816])
def test_a_disk_that_fills_up_ends_the_dump_and_not_the_training(kib: int, tmp_path: Path) -> None:
    """While the model, its state, the optimizer or the rows are written. behaviour: B47"""
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(dumps)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, timeout=10).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        made = make_dumps(tmp_path, {"name": "grpo"})
        assert made.reporter.counts == {"dumps_failed": 1} and made.reporter.facts["dump_error"]
        assert list(dumps.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(dumps)], check=True, timeout=10)


def test_of_a_step_that_did_not_commit_nothing_stays(tmp_path: Path) -> None:
    made = make_dumps(tmp_path, {"name": "grpo"})
    made.dumper.begin(2)
    assert [path.name for path in sorted((tmp_path / "dumps").iterdir())] == [".step-00000002", "step-00000001"]
    made.dumper.discard()
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["step-00000001"]


def test_dump_lists_steps_fields_and_shapes(recorded: Made) -> None:
    shown = relax("dump", recorded.run_dir)
    assert shown.exit_code == 0 and "step 1, version 0" in shown.output and "step 2, version 1" in shown.output
    facts = json.loads(relax("dump", recorded.run_dir, "--steps", "2-", "--json").stdout)
    (only,) = facts.values()
    assert only["step"] == 2 and only["fields"]["tokens"] == ["int32", "[T]", 12]
    assert relax("dump", recorded.run_dir, "--steps", "7").exit_code == 2


def test_dump_of_a_run_file_asks_for_steps() -> None:
    refused = relax("dump", Path(__file__).parents[2] / "deploy" / "tiny_cpu.yaml")
    assert refused.exit_code == 2 and "--steps 1-3" in refused.output


def test_steps_that_the_run_does_not_have_are_refused_before_it_starts() -> None:
    tiny = Path(__file__).parents[2] / "deploy" / "tiny_cpu.yaml"
    with pytest.raises(ConfigError, match=r"the run has \d+ steps, none would be recorded"):
        load_run_file(tiny, ["actor.dump.steps=900-"])


def test_replay_prints_verdicts_and_its_exit_code_tells(folder: Path) -> None:
    same = relax("replay", folder, "--tolerance", "1e-6")
    assert same.exit_code == 0 and "DIFFERS" not in same.output, same.output
    change_file(folder, ROW, "reward", 3.0)
    other = relax("replay", folder)
    assert other.exit_code == 1 and f"reward: row {ROW}, 3 against" in other.output, other.output
    found = json.loads(relax("replay", folder, "--json").stdout)
    assert [f["field"] for f in found["fields"] if not f["equal"]] == ["reward"]
    refused = relax("replay", folder, "--set", "actor.algorithm.clip_hihg=1")
    assert refused.exit_code == 2 and "clip_high" in refused.output


def test_diff_prints_where_and_its_exit_code_tells(recorded: Made, folder: Path) -> None:
    assert relax("diff", recorded.folder(1), folder).exit_code == 0
    change_file(folder, ROW, "reward", 3.0)
    other = relax("diff", recorded.run_dir, folder)
    assert other.exit_code == 1 and f"they part in step 1 at reward: row {ROW}, " in other.output, other.output
    assert json.loads(relax("diff", recorded.run_dir, folder, "--json").stdout)["first"]["field"] == "reward"
    assert relax("diff", recorded.run_dir, folder, "--tolerance", "5").exit_code == 0
    assert relax("diff", recorded.run_dir, folder / "none").exit_code == 2


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("3", [3]),
        ("1-3,10", [1, 2, 3, 10]),
        ("9-", [9, 10, 11, 12]),
        ("1-/5", [1, 6, 11]),
        ("2-8/3", [2, 5, 8]),
        ("", []),
    ],
)
def test_steps_are_chosen_by_numbers_and_ranges(text: str, chosen: list[int]) -> None:
    assert [step for step in range(1, 13) if DumpConfig(steps=text).wants(step)] == chosen


@pytest.mark.parametrize("text", ["1:3", "0", "3-1", "a", "1-2-3", "1-/0"])
def test_steps_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"steps '{text}'"):
        DumpConfig(steps=text)


def test_steps_may_be_a_number_or_a_list_in_yaml() -> None:
    assert DumpConfig.model_validate({"steps": 3}).steps == "3"
    assert DumpConfig.model_validate({"steps": [1, "4-6"]}).steps == "1,4-6"

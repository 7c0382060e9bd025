"""`relax resume` before any service starts: what it reads, refuses and prepares."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from relax.checkpoint.manifest import MANIFEST_NAME, CheckpointSchemaError
from relax.checkpoint.store import CheckpointStore
from relax.cli.main import app
from relax.cli.resume import CannotResume, Point, changed_file, go_back, point_of, previous_config, why_complete
from relax.cli.run import store_run_file
from relax.config.file import load_run_file
from relax.telemetry.run_folder import RunFolder
from relax.types import GroupId, PolicyVersion
from services.rollout.ledger import AdmissionEntry, Ledger, LedgerBusy, LedgerSchemaError, Terminal, TerminalState

TINY = Path(__file__).parents[2] / "deploy" / "tiny_cpu.yaml"
GROUPS = 2


def resume(run_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["resume", str(run_dir), *arguments])


def words(result: Result) -> str:
    return " ".join(result.output.split())


def make_run(run_dir: Path, *, trained: int, saved: Sequence[int], overrides: Sequence[str] = ()) -> RunFolder:
    """A run that was killed after `trained` steps of two groups, with two more admitted; `saved`: its checkpoints."""
    folder = RunFolder(run_dir)
    store_run_file(load_run_file(TINY, [f"run.run_dir={run_dir}", "run.steps=40", *overrides]), run_dir)
    with Ledger(run_dir / "ledger.sqlite") as ledger:
        for step in range(1, trained + 2):
            names = [GroupId(f"toy:0:{GROUPS * step + k}") for k in range(GROUPS)]
            ledger.admit(
                [
                    AdmissionEntry(
                        ledger.next_seq + k, name, 1, {"position": GROUPS * step + k}, PolicyVersion(step - 1)
                    )
                    for k, name in enumerate(names)
                ]
            )
            if step <= trained:
                ledger.record(
                    [
                        Terminal(name, TerminalState.TRAINED, step, PolicyVersion(step), samples={"trained": 1})
                        for name in names
                    ]
                )
    for step in range(1, trained + 1):
        folder.append_metrics({"step": step, "reward_mean": step / 100})
    store = CheckpointStore(run_dir / "checkpoints")
    for step in saved:
        history = [[known, known, {}] for known in range(max(1, step - 3), step + 1)]
        store.save(step, lambda path: (path / "state").write_text("weights") and None, {"history": history})
    return folder


def steps_of(folder: RunFolder) -> list[int]:
    return [int(record["step"]) for record in folder.read_metrics()]


def test_where_the_ledger_is_ahead_it_goes_back_and_what_was_trained_later_is_open_again(tmp_path: Path) -> None:
    """behaviour: B12"""
    folder = make_run(tmp_path, trained=7, saved=[2, 5])
    point = point_of(tmp_path, Console(quiet=True))
    assert (point.step, point.trained_through, point.missing_steps()) == (5, 7, [])
    go_back(tmp_path, point.step)
    assert folder.cut_metrics(point.step) == 7
    with Ledger(tmp_path / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.trained_through == 5 and ledger.lineage == 1
        assert [entry.group_id for entry in ledger.open_groups()] == [f"toy:0:{k}" for k in range(12, 18)]
        assert ledger.last_cursor() == {"position": 17}, "the source goes on behind all that was drawn"
    assert steps_of(folder) == [1, 2, 3, 4, 5]
    go_back(tmp_path, point.step)
    with Ledger(tmp_path / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.lineage == 1, "nothing to take back"


def test_where_the_ledger_is_at_the_checkpoint_nothing_changes(tmp_path: Path) -> None:
    folder = make_run(tmp_path, trained=5, saved=[5])
    go_back(tmp_path, point_of(tmp_path, Console(quiet=True)).step)
    assert folder.cut_metrics(5) == 0 and steps_of(folder) == [1, 2, 3, 4, 5]
    assert not (tmp_path / "metrics_superseded.jsonl").exists()
    with Ledger(tmp_path / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.lineage == 0 and len(ledger.open_groups()) == GROUPS


def test_a_torn_checkpoint_is_told_and_the_one_before_is_taken(tmp_path: Path) -> None:
    """behaviour: B13"""
    make_run(tmp_path, trained=5, saved=[2, 5])
    [torn] = (tmp_path / "checkpoints").glob("*-step-00000005")
    (torn / MANIFEST_NAME).unlink()
    console = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    assert point_of(tmp_path, console).step == 2
    assert f"ignoring torn checkpoint {torn}" in console.export_text()


def test_without_a_checkpoint_the_run_begins_again(tmp_path: Path) -> None:
    make_run(tmp_path, trained=3, saved=[])
    assert point_of(tmp_path, Console(quiet=True)) == Point(0, 3)
    go_back(tmp_path, 0)
    with Ledger(tmp_path / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.trained_through == 0 and len(ledger.open_groups()) == 4 * GROUPS


def test_a_checkpoint_ahead_of_its_ledger_tells_what_it_knows_and_a_gap_is_refused(tmp_path: Path) -> None:
    """behaviour: B12"""
    make_run(tmp_path, trained=3, saved=[5])
    assert point_of(tmp_path, Console(quiet=True)).missing_steps() == []
    shutil.rmtree(tmp_path)
    make_run(tmp_path, trained=3, saved=[9])
    with pytest.raises(CannotResume, match="what steps 4 to 5 trained is lost; restore the ledger"):
        point_of(tmp_path, Console(quiet=True))
    (tmp_path / "ledger.sqlite").unlink()
    with pytest.raises(CannotResume, match="nobody knows which prompts were trained"):
        point_of(tmp_path, Console(quiet=True))


def test_other_schema_versions_are_refused_with_what_to_do(tmp_path: Path) -> None:
    make_run(tmp_path, trained=5, saved=[5])
    [manifest] = (tmp_path / "checkpoints").glob(f"*/{MANIFEST_NAME}")
    text = manifest.read_text()
    manifest.write_text(text.replace('"schema_version": 1', '"schema_version": 9'))
    with pytest.raises(CheckpointSchemaError, match="continue the run with the program that saved it"):
        point_of(tmp_path, Console(quiet=True))
    manifest.write_text(text)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger._db.execute("UPDATE meta SET value = '77' WHERE key = 'schema_version'")
    with pytest.raises(
        LedgerSchemaError, match=r"schema version 77, .* continue the run with the program that began it"
    ):
        point_of(tmp_path, Console(quiet=True))
    result = resume(tmp_path)
    assert result.exit_code == 1 and "schema version 77" in words(result)


def test_a_run_that_still_writes_its_ledger_is_left_alone(tmp_path: Path) -> None:
    make_run(tmp_path, trained=5, saved=[5])
    with Ledger(tmp_path / "ledger.sqlite"), pytest.raises(LedgerBusy):
        point_of(tmp_path, Console(quiet=True))


def test_after_the_last_step_it_says_that_the_run_is_complete(tmp_path: Path) -> None:
    """behaviour: B14"""
    folder = make_run(tmp_path, trained=40, saved=[30, 40])
    folder.write_summary({"state": "finished", "steps": 40})
    before = sorted(path.name for path in tmp_path.iterdir())
    result = resume(tmp_path)
    assert result.exit_code == 0 and "the run is complete: 40 steps are trained" in words(result)
    result = resume(tmp_path, "--set", "run.steps=35")
    assert result.exit_code == 0 and "40 steps are trained, and run.steps is 35" in words(result)
    assert sorted(path.name for path in tmp_path.iterdir()) == before and steps_of(folder) == list(range(1, 41))


@pytest.mark.parametrize(
    ("state", "summary_steps", "overrides", "complete"),
    [
        ("finished", 30, (), True),
        ("finished", 30, ("run.steps=80",), True),
        ("finished", 30, ("rollout.data.epochs=5",), False),
        ("stopped", 30, (), False),
        ("finished", 20, (), False),
    ],
)
def test_a_run_whose_data_ended_is_complete_until_there_is_more_of_it(
    tmp_path: Path, state: str, summary_steps: int, overrides: tuple[str, ...], complete: bool
) -> None:
    """behaviour: B14"""
    folder = make_run(tmp_path, trained=30, saved=[30], overrides=["rollout.data.epochs=2"])
    summary = {"state": state, "steps": summary_steps}
    file = changed_file(folder, None, overrides)
    reason = why_complete(Point(30, 30), previous_config(folder), file, summary)
    assert (reason is not None) is complete
    if reason is not None:
        assert "its data ended after step 30, and rollout.data.epochs is 2" in reason


def test_more_steps_than_before_are_left_to_train(tmp_path: Path) -> None:
    folder = make_run(tmp_path, trained=40, saved=[40])
    file = changed_file(folder, None, ["run.steps=80"])
    assert why_complete(Point(40, 40), previous_config(folder), file, {"state": "finished", "steps": 40}) is None


def test_a_refused_change_is_an_error_that_says_why_and_nothing_is_touched(tmp_path: Path) -> None:
    folder = make_run(tmp_path, trained=7, saved=[5])
    result = resume(tmp_path, "--set", "run.seed=5", "--set", "run.steps=50", "--set", "rollout.data.shuffle=false")
    assert result.exit_code == 2
    assert "run.seed cannot change when a run is resumed: run.seed: 1 -> 5: weights, order" in words(result)
    assert "rollout.data.shuffle" in words(result) and "run.steps" not in words(result)
    assert point_of(tmp_path, Console(quiet=True)).trained_through == 7 and steps_of(folder)[-1] == 7


def test_a_changed_copy_of_the_file_and_a_moved_folder_are_taken(tmp_path: Path) -> None:
    make_run(tmp_path / "old", trained=5, saved=[5])
    (tmp_path / "old").rename(tmp_path / "new")
    folder = RunFolder(tmp_path / "new")
    copy = tmp_path / "copy.yaml"
    copy.write_text((folder.path / "run_file.yaml").read_text().replace("steps: 40", "steps: 60"))
    file = changed_file(folder, copy, ["rollout.instances=1"])
    assert (file.run.steps, file.rollout.instances, file.run.run_dir) == (60, 1, str(tmp_path / "new"))
    assert previous_config(folder)["run"]["run_dir"] == str(tmp_path / "new")


def test_what_is_no_run_of_this_command_is_refused(tmp_path: Path) -> None:
    result = resume(tmp_path)
    assert result.exit_code == 1 and "is no run folder" in words(result)
    (tmp_path / "config.json").write_text("{}")
    result = resume(tmp_path)
    assert result.exit_code == 1 and "give its run file by --file" in words(result)


def test_a_later_record_of_a_step_takes_the_place_of_earlier_ones(tmp_path: Path) -> None:
    """As after a rollback inside of a run, when the file goes on."""
    folder = RunFolder(tmp_path)
    records: list[dict[str, Any]] = [{"step": step, "loss": 0.1 * step} for step in (1, 2, 3, 4)]
    again = [{"step": 2, "loss": 7.0}, {"step": 3, "loss": 8.0}]
    for record in [*records, *again]:
        folder.append_metrics(record)
    assert folder.read_metrics() == [records[0], *again]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6
    assert folder.cut_metrics(2) == 3
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        records[0],
        again[0],
    ]

"""Options of `relax chaos` that are refused before anything starts, and the simulation through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relax.cli.chaos import prepare
from relax.cli.main import app

ROOT = Path(__file__).parents[2]
TINY = ROOT / "deploy" / "tiny_cpu.yaml"
SMALL = ["run.groups_per_step=8", "run.group_size=2"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--faults", "kill:actr"], "did you mean 'kill:actor'"),
        (["--faults", "kill:actor:mid_put"], "unknown fault 'kill:actor:mid_put'"),
        (["--faults", "kill:actor@9999"], "scheduled after the last step"),
        (["--kills", "0"], "there is no fault to inject"),
        (["--set", "run.stepz=3"], "did you mean 'steps'"),
        (["--simulated", "--faults", "kill:actor"], "draws its own faults"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], words: str, tmp_path: Path) -> None:
    """behaviour: B40"""
    done = CliRunner().invoke(app, ["chaos", str(TINY), "--set", f"run.run_dir={tmp_path / 'run'}", *options])
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


def test_the_names_of_all_faults_are_listed() -> None:
    done = CliRunner().invoke(app, ["chaos", str(TINY), "--list"])
    assert done.exit_code == 0
    assert {"kill:actor", "hang:instance", "slow:ref", "kill:dcs:dcs_mid_publish"} <= set(done.output.split())


def test_processes_are_told_of_the_points_and_the_bus_may_be_lost_as_often_as_planned() -> None:
    file, planned = prepare(TINY, [], "kill:bus,kill:store,kill:actor:before_commit,full:save@5", 12, 1)
    assert len(planned) == 13
    assert {fault.name for fault in file.run.fault_points} == {
        "before_commit-actor-kill-armed",
        "mid_save-dcs-no_space-armed",
    }
    assert file.controller.recovery.bus_budget == 10 + 8


def test_a_simulated_run_is_struck_and_judged() -> None:
    """behaviour: B12 B16"""
    settings = [word for setting in SMALL for word in ("--set", setting)]
    done = CliRunner().invoke(app, ["chaos", str(TINY), "--simulated", "--kills", "6", "--json", *settings])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["ok"] and report["kills"] == 6 and report["broken"] == []
    assert report["consumed"] == report["consumed_unbroken"] == report["trained"] + report["dropped"]

"""`relax chaos` on the toy run: a few faults of each kind, and a verdict that can be trusted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_support import EASY, TINY

STEPS = 60
FAULTS = "kill:instance@6,crash:reward_worker@10,kill:actor:after_snapshot@14,kill:bus@22,kill:reward:before_ack@30"


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_that_is_struck_goes_through_and_says_so(tmp_path: Path) -> None:
    """behaviour: B12 B16 B34 B39 B44"""
    (tmp_path / "shm").mkdir()
    settings = [
        *EASY,
        f"run.steps={STEPS}",
        f"run.run_dir={tmp_path / 'run'}",
        f"dcs.shm_dir={tmp_path / 'shm'}",
        "controller.expect={}",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "relax.cli.main", "chaos", str(TINY), "--faults", FAULTS, "--kills", "0", "--json"]
    done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=590)
    report = json.loads(done.stdout)
    assert (done.returncode, report["broken"]) == (0, []), done.stderr
    assert report["injected"] == 5 and report["run"]["steps"] == STEPS
    for fault in report["faults"]:
        assert fault["recovered_s"] is not None, fault
    assert set(report["restarts"]) <= {"rollout-0", "rollout-1", "actor", "bus", "store", "reward"}
    assert not list((tmp_path / "shm").iterdir())

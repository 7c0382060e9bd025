from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from relax.cli.main import app

PROFILE = str(Path(__file__).parents[2] / "deploy" / "sim_16xh800.yaml")


def test_the_modes_are_printed_beside_the_published_figures() -> None:
    """The trainer is fitted on the colocated figure alone; the others are predictions, with their error."""
    done = CliRunner().invoke(app, ["simulate", PROFILE, "--json", "--set", "run.steps=8"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert set(report) == {"colocate", "staleness_0", "staleness_1", "staleness_2"}
    assert abs(report["colocate"]["error"]) < 0.005
    for name in ("staleness_0", "staleness_1"):
        assert abs(report[name]["error"]) < 0.2
    assert report["staleness_1"]["speedup"] > report["staleness_0"]["speedup"] > 1
    table = CliRunner().invoke(app, ["simulate", PROFILE, "--set", "run.steps=8"])
    assert "published" in table.output and "225.9 s" in table.output

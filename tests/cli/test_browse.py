"""`relax samples`, `relax plot` and `relax trace` on a small run folder made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from relax.cli.main import app
from relax.telemetry.run_folder import RunFolder
from relax.telemetry.trace import Tracer
from relax.types import GroupId, PolicyVersion
from services.rollout.ledger import AdmissionEntry, Ledger, Terminal, TerminalState

REWARDS = {"toy:0:1/0/0": 0.5, "toy:0:1/1/0": 1.0, "toy:0:2/0/0": 0.0, "toy:0:2/1/0": None, "toy:0:3/0/0": 0.25}


def relax(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def sample(row_id: str, reward: float | None, **fields: Any) -> dict[str, Any]:
    record = {
        "row_id": row_id,
        "purpose": "train",
        "version": 3,
        "prompt": "12>",
        "response": f"answer of {row_id}",
        "label": "21",
        "reward": reward,
        "accuracy": reward,
        "parts": {} if reward is None else {"exact": reward, "overlap": 0.125},
        "reward_state": "timeout" if reward is None else "ok",
        "finish_reason": "length",
    }
    return {**record, **fields}


def make_run(path: Path, steps: int = 5, slope: float = 0.1) -> Path:
    folder = RunFolder(path)
    for step in range(1, steps + 1):
        folder.append_metrics({"step": step, "reward_mean": slope * step, "loss": -slope * step})
    folder.append_samples(sample(row_id, reward) for row_id, reward in REWARDS.items())
    folder.append_samples([sample("held:0:1/0/0", 0.75, purpose="eval")])
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Groups toy:0:1 and toy:0:2 were trained in steps 1 and 2; toy:0:3 is open."""
    path = make_run(tmp_path / "one")
    groups = [GroupId(f"toy:0:{number}") for number in (1, 2, 3)]
    with Ledger(path / "ledger.sqlite") as ledger:
        ledger.admit([AdmissionEntry(n, group, 1, {}, PolicyVersion(0)) for n, group in enumerate(groups)])
        ledger.record([Terminal(groups[n], TerminalState.TRAINED, n + 1, PolicyVersion(n + 1)) for n in (0, 1)])
    return path


def rows(*arguments: object) -> list[str]:
    done = relax("samples", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return [json.loads(line)["row_id"] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (["--purpose", "eval"], ["held:0:1/0/0"]),
        (["--group", "toy:0:1"], ["toy:0:1/0/0", "toy:0:1/1/0"]),
        (["--step", "2"], ["toy:0:2/0/0", "toy:0:2/1/0"]),
        (["--step", "1:"], ["toy:0:1/0/0", "toy:0:1/1/0", "toy:0:2/0/0", "toy:0:2/1/0"]),
        (["--min-reward", "0.5"], ["toy:0:1/0/0", "toy:0:1/1/0", "held:0:1/0/0"]),
        (["--max-reward", "0.25"], ["toy:0:2/0/0", "toy:0:3/0/0"]),
        (["--min-reward", "0.5", "--max-reward", "0.5"], ["toy:0:1/0/0"]),
        (["--failed"], ["toy:0:2/1/0"]),
        (["--sort", "-reward", "-n", "2"], ["toy:0:1/1/0", "held:0:1/0/0"]),
        (["--sort", "reward", "-n", "2"], ["toy:0:2/1/0", "toy:0:2/0/0"]),
        (["--limit", "1"], ["toy:0:1/0/0"]),
        (["--limit", "0"], [*REWARDS, "held:0:1/0/0"]),
    ],
)
def test_samples_are_filtered_sorted_and_cut(run_dir: Path, filters: list[str], kept: list[str]) -> None:
    assert rows(run_dir, *filters) == kept


def test_a_sample_shows_what_was_asked_answered_and_scored(run_dir: Path) -> None:
    shown = relax("samples", run_dir, "--group", "toy:0:1", "-n", "1").output
    for words in ("toy:0:1/0/0", "step 1", "version 3", "length", "12>", "answer of", "21", "reward 0.5", "exact 0.5"):
        assert words in shown, shown
    assert "overlap 0.125" in shown and "1 of 2 samples" in shown
    failed = relax("samples", run_dir, "--failed").output
    assert "reward timeout" in failed
    assert "not trained" in relax("samples", run_dir, "--group", "toy:0:3").output


def test_brackets_that_a_model_wrote_are_text(run_dir: Path) -> None:
    RunFolder(run_dir).append_samples([sample("toy:0:9/0/0", 0.5, response="[red]x[/] [/bad]", prompt="[b]?")])
    shown = relax("samples", run_dir, "--group", "toy:0:9").output
    assert "[red]x[/] [/bad]" in shown and "[b]?" in shown


def test_samples_of_a_run_without_a_ledger_have_no_step(tmp_path: Path) -> None:
    path = make_run(tmp_path / "bare")
    assert rows(path, "--step", "1") == [] and len(rows(path)) == 6
    assert "no sample matches" in relax("samples", path, "--step", "1").output


def test_a_torn_last_line_is_left_out(run_dir: Path) -> None:
    """behaviour: B13"""
    for name in ("samples.jsonl", "metrics.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write('{"row_id": "toy:0:9/0/0", "ste')
    assert len(rows(run_dir)) == 6
    assert relax("plot", run_dir, "-m", "loss").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sort", "rewrd"], "did you mean 'reward'?"),
        (["--purpose", "trian"], "did you mean 'train'?"),
        (["--step", "two"], "expected a number or first:last"),
        (["--step", "5:3"], "expected a number or first:last"),
    ],
)
def test_samples_refuses_what_it_cannot_mean(run_dir: Path, arguments: list[str], words: str) -> None:
    done = relax("samples", run_dir, *arguments)
    assert done.exit_code == 1 and words in done.output, done.output


@pytest.mark.parametrize("command", ["samples", "plot", "trace"])
def test_a_folder_without_a_run_is_named(tmp_path: Path, command: str) -> None:
    missing = relax(command, tmp_path / "none")
    assert missing.exit_code == 1 and f"{tmp_path / 'none'}: no such folder" in missing.output.replace("\n", "")
    (tmp_path / "empty").mkdir()
    empty = relax(command, tmp_path / "empty")
    assert empty.exit_code == 1 and "is no run folder" in empty.output.replace("\n", " ")
    assert list((tmp_path / "empty").iterdir()) == [], "looking changes nothing"


# ---------------------------------------------------------------- plot


def test_runs_are_compared_in_one_plot_per_metric(run_dir: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "two", steps=8, slope=0.2)
    done = relax("plot", run_dir, other, "-m", "reward_mean", "-m", "loss", "--width", "90")
    assert done.exit_code == 0, done.output
    assert "reward_mean   last: one 0.5  two 1.6" in done.output
    assert "loss   last: one -0.5  two -1.6" in done.output
    assert any("⠀" < character <= "⣿" for character in done.output), "dots are drawn"
    assert max(len(line) for line in done.output.splitlines()) <= 90


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")
    assert "a/run 0.5  b/run 0.5" in relax("plot", first, second).output
    assert "given twice" in relax("plot", first, first).output


def test_a_single_step_is_a_point(tmp_path: Path) -> None:
    done = relax("plot", make_run(tmp_path / "short", steps=1))
    assert done.exit_code == 0, done.output
    assert any("⠀" < character <= "⣿" for character in done.output)


def test_an_svg_file_holds_a_line_per_metric_and_run(run_dir: Path, tmp_path: Path) -> None:
    other, out = make_run(tmp_path / "two"), tmp_path / "plot.svg"
    done = relax("plot", run_dir, other, "-m", "reward_mean", "-m", "loss", "--out", out)
    assert done.exit_code == 0, done.output
    root = ElementTree.parse(out).getroot()
    assert len(root.findall(".//{*}polyline")) == 4
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}tspan")]
    assert words == ["one 0.5", "two 0.5", "one -0.5", "two -0.5"]
    refused = relax("plot", run_dir, "--out", tmp_path / "none" / "plot.svg")
    assert refused.exit_code == 1 and "cannot write" in refused.output


@pytest.mark.parametrize(
    ("metric", "words"),
    [("reward", "did you mean 'reward_mean'?"), ("kl", "none of these runs recorded it"), ("zzz", "known: loss")],
)
def test_an_unknown_metric_is_refused_with_the_nearest_name(run_dir: Path, metric: str, words: str) -> None:
    done = relax("plot", run_dir, "-m", metric)
    assert done.exit_code == 1 and words in done.output.replace("\n", " "), done.output


def test_a_run_without_steps_cannot_be_plotted(tmp_path: Path) -> None:
    RunFolder(tmp_path / "new").write_config({})
    done = relax("plot", tmp_path / "new")
    assert done.exit_code == 1 and "no step was recorded" in done.output


# ---------------------------------------------------------------- trace


@pytest.fixture
def traced(run_dir: Path) -> Path:
    folder = RunFolder(run_dir)
    instance, actor = Tracer(1.0, "instance", "rollout-0"), Tracer(1.0, "actor", "actor")
    for step in (1, 2, 3):
        instance.add("generate", 10.0 * step, 10.0 * step + 2, [(f"toy:0:{step}", 0)], version=step - 1)
        actor.add("train", 10.0 * step + 3, 10.0 * step + 4, [(f"toy:0:{step}", 0)], step=step)
    for tracer in (instance, actor):
        tracer.write(folder)
    return run_dir


def test_a_trace_file_holds_the_steps_asked_for(traced: Path, tmp_path: Path) -> None:
    done = relax("trace", traced)
    assert done.exit_code == 0 and "6 spans of 3 samples" in done.output, done.output
    assert len(json.loads((traced / "trace.json").read_text())["traceEvents"]) > 6
    out = tmp_path / "two.json"
    assert "4 spans of 2 samples" in relax("trace", traced, "--steps", "2:", "--out", out).output
    names = {e["name"] for e in json.loads(out.read_text())["traceEvents"] if e.get("cat") == "sample"}
    assert names == {"toy:0:2/0", "toy:0:3/0"}


def test_the_way_of_one_sample_is_a_table(traced: Path) -> None:
    shown = relax("trace", traced, "--sample", "toy:0:2/0").output
    assert "generate" in shown and "rollout-0" in shown and "3000.0" in shown and "step 2" in shown
    unknown = relax("trace", traced, "--sample", "toy:0:7/0")
    assert unknown.exit_code == 1 and "3 samples are traced, e.g. toy:0:1/0" in unknown.output.replace("\n", " ")


def test_a_trace_of_nothing_says_why(run_dir: Path, traced: Path, tmp_path: Path) -> None:
    done = relax("trace", traced, "--steps", "9")
    assert done.exit_code == 1 and "traced are steps 1 to 3" in done.output
    untraced = make_run(tmp_path / "untraced")
    assert "trace_share" in relax("trace", untraced).output

"""What a controller takes up from the folder of a run that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax.config.file import load_run_file
from relax.config.sections import ControllerArgs
from relax.telemetry.run_folder import RunFolder
from relax.telemetry.summary import build_summary
from services.controller.api import EvalReport
from services.controller.book import RunBook
from services.controller.closing import final_facts
from services.controller.earlier import eval_line, take_up_evals

TINY = Path(__file__).parents[2] / "deploy" / "tiny_cpu.yaml"
BEFORE = EvalReport("before", 0, (0.0, 0.5, 0.0), {"exact": 0.1}, {1: 0.2, 2: 0.3})


@pytest.fixture
def book() -> RunBook:
    file = load_run_file(TINY)
    return RunBook(ControllerArgs(run=file.run, controller=file.controller), 0.0)


def test_steps_and_evaluations_of_the_earlier_part_count_for_the_whole_run(tmp_path: Path, book: RunBook) -> None:
    folder = RunFolder(tmp_path)
    for step, reward in ((1, 0.1), (2, 0.2)):
        folder.append_metrics({"step": step, "reward_mean": reward})
    folder.append_eval(eval_line(BEFORE))
    book.restore([], None, folder.read_metrics(), 0.0)
    take_up_evals(book, folder)
    assert book.evals == {"before": BEFORE}, "prompt by prompt: the gain is of pairs"
    assert not book.record_step({"step": 2.0, "reward_mean": 0.9}), "the actor tells its last step again"
    assert book.record_step({"step": 3.0, "reward_mean": 0.8})
    book.evals["after"] = EvalReport("after", 3, (1.0, 1.0, 1.0))
    summary = build_summary(book.steps, final_facts(book, None, 1.0), seed=1)
    assert (summary["steps"], summary["reward_first"], summary["reward_last"]) == (3, 0.1, 0.8)
    assert summary["eval_gain_lower95"] > 0.5


def test_a_new_run_has_nothing_to_take_up(tmp_path: Path, book: RunBook) -> None:
    take_up_evals(book, RunFolder(tmp_path))
    assert book.steps == [] and book.evals == {}

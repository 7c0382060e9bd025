"""What an earlier part of the run wrote of its evaluations: a controller that comes up goes on from it."""

from __future__ import annotations

from typing import Any

from relax.telemetry.run_folder import RunFolder
from services.controller.api import EvalReport
from services.controller.book import RunBook
from services.controller.closing import eval_json


def take_up_evals(book: RunBook, folder: RunFolder) -> None:
    """The one before the first step is of the whole run."""
    for line in folder.read_evals():
        report = eval_report(line)
        book.evals[report.when] = report


def eval_line(report: EvalReport) -> dict[str, Any]:
    """A line of evals.jsonl."""
    return {**eval_json(report), "by_prompt": list(report.accuracy)}


def eval_report(line: dict[str, Any]) -> EvalReport:
    """Of a line of evals.jsonl."""
    return EvalReport(
        when=line["when"],
        version=line["version"],
        accuracy=tuple(line.get("by_prompt", (line["accuracy"],))),
        parts=line["parts"],
        pass_at={int(k): value for k, value in line["pass_at"].items()},
    )

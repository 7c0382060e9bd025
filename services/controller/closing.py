"""What is written when a run ends: summary, report, and which expectations it broke."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from bus.records import BusStats
from relax.control.runstate import RunState
from relax.telemetry.report import write_report
from relax.telemetry.run_folder import RunFolder
from relax.telemetry.summary import FinalFacts, build_summary, check_expectations
from services import names
from services.controller.api import EvalReport
from services.controller.book import RunBook
from services.controller.log import OperationLog


@dataclass(frozen=True, slots=True)
class Closed:
    summary: dict[str, Any]
    violations: list[str]


def final_facts(book: RunBook, stats: BusStats | None, wall_s: float) -> FinalFacts:
    """From the book and the last snapshot of the bus."""
    account = stats.account if stats is not None else None
    actor = book.replicas.get(names.ACTOR)
    facts = actor.beat.facts if actor is not None else {}
    before, after = book.evals.get("before"), book.evals.get("after")
    return FinalFacts(
        wall_s=wall_s,
        engine_versions={name: report.version for name, report in sorted(book.adoptions.items())},
        digest_ok=book.digest_failures == 0 and (bool(book.adoptions) or not book.args.run.generates),
        logprob_gap_max=book.gap_max,
        logprob_gap_mean=book.gap_mean,
        produced=account.produced if account else 0,
        trained=account.trained if account else 0,
        dropped_by_reason=dict(account.dropped) if account else {},
        queued=account.queued if account else 0,
        restarts_unasked=book.restarts(),
        bus_restarts=book.bus_restarts,
        checkpoints_failed=int(book.counter(names.ACTOR, "checkpoints_failed")),
        checkpoint_error=facts.get("checkpoint_error"),
        dumps_failed=int(book.counter(names.ACTOR, "dumps_failed")),
        dump_error=facts.get("dump_error"),
        spans_dropped=int(sum(replica.counter("spans_dropped") for replica in book.replicas.values())),
        lag_histogram={int(lag): int(count) for lag, count in facts.get("lag_histogram", {}).items()},
        max_staleness=book.args.run.max_staleness,
        eval_before=before.accuracy if before else None,
        eval_after=after.accuracy if after else None,
        eval_parts={"before": before.parts, "after": after.parts} if before and after else {},
        role_time=book.role_time(),
    )


def close_run(
    book: RunBook,
    folder: RunFolder,
    stats: BusStats | None,
    wall_s: float,
    state: RunState,
    reason: str,
    tracker_errors: dict[str, str],
    log: OperationLog,
) -> Closed:
    """Write summary and report. Expectations are checked on a finished run only."""
    facts = final_facts(book, stats, wall_s)
    summary = build_summary(book.steps, facts, seed=book.args.run.seed)
    summary["tracker_errors"] = tracker_errors
    summary["incidents"] = log.fault_counts()
    summary["evals"] = [eval_json(report) for report in book.evals.values()]
    summary = {"run": book.args.run.name, "state": state.value, "reason": reason or None, **summary}
    violations = []
    if state is RunState.FINISHED:
        violations = check_expectations(summary, book.args.controller.expect)
    folder.write_summary({**summary, "violations": violations})
    write_report(folder)
    return Closed(summary, violations)


def eval_json(report: EvalReport) -> dict[str, Any]:
    """As the summary shows it."""
    return {
        "when": report.when,
        "version": report.version,
        "accuracy": statistics.fmean(report.accuracy),
        "parts": dict(report.parts),
        "pass_at": {str(k): value for k, value in report.pass_at.items()},
    }


def stats_json(stats: BusStats) -> dict[str, Any]:
    """For the status endpoint: plain numbers, the account's on top."""
    account = stats.account
    return {
        "produced": account.produced,
        "trained": account.trained,
        "dropped": sum(account.dropped.values()),
        "dropped_by_reason": dict(account.dropped),
        "queued": account.queued,
        "running": account.running,
        "waiting": account.waiting,
        **{
            field.name: getattr(stats, field.name)
            for field in dataclasses.fields(stats)
            if field.name not in ("account",)
        },
    }


def in_flight(book: RunBook, stats: BusStats | None, operations: int, now: float) -> dict[str, dict[str, float]]:
    """What is begun and not ended, by role, `bus` and `controller`; empty when nothing is. Rows that wait in the bus
    for nobody are not in flight: what a finished run leaves there is in its account."""
    found = book.in_flight(now)
    if stats is not None:
        leased: dict[str, float] = {}
        for held in stats.held:
            leased[f"leased for {held.task}"] = leased.get(f"leased for {held.task}", 0.0) + held.items
        if stats.account.running:
            leased["samples being generated"] = float(stats.account.running)
        if leased:
            found["bus"] = leased
    if operations:
        found["controller"] = {"operations": float(operations)}
    return found

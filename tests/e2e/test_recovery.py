"""Processes die while a run goes on; what was trained, and how often, is as if none had."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from e2e_support import EASY, Finished, Runner, kill_once

from services.rollout.ledger import Ledger, TerminalState

GROUPS = 8
STEPS = 60


def kill_bus(condition: Callable[[dict[str, Any]], bool], process: str) -> Callable[[dict[str, Any]], None]:
    """SIGKILL a process of the bus, once, when the condition holds."""
    killed: list[int] = []

    def during(status: dict[str, Any]) -> None:
        if killed or not condition(status):
            return
        [controller] = [view["pid"] for view in status["roles"] if view["instance"] == "actor"]
        raylet = psutil.Process(controller).parent()
        assert raylet is not None
        for child in raylet.children():
            if "".join(child.cmdline()[:1]).startswith(f"ray::{process}"):
                os.kill(child.pid, signal.SIGKILL)
                killed.append(child.pid)
        assert killed, f"no {process}"

    return during


def check_trained_once(done: Finished, steps: int) -> None:
    """Each step has its groups, no group is in two of them, and none was passed over (B12, B16)."""
    with Ledger(done.folder / "ledger.sqlite", read_only=True) as ledger:
        trained = ledger.terminals(TerminalState.TRAINED)
        counts = ledger.counts()
    assert Counter(terminal.step for terminal in trained) == {step: GROUPS for step in range(1, steps + 1)}
    assert len({terminal.group_id for terminal in trained}) == steps * GROUPS
    assert (counts.admitted, counts.trained) == (steps * GROUPS, steps * GROUPS), "every prompt that was drawn"
    summary = done.summary
    assert summary["produced"] == summary["trained"] + summary["dropped"] + summary["queued"]
    assert summary["trained"] == steps * GROUPS * 16


@pytest.mark.parametrize("process", ["EngineHost", "StorageHost"])
def test_a_bus_that_was_lost_is_made_anew_and_nothing_is_trained_twice(run: Runner, process: str) -> None:
    """behaviour: B12 B16"""
    done = run(*EASY, f"run.steps={STEPS}", during=kill_bus(lambda status: status["step"] >= 5, process))
    assert done.outcome.state == "finished", done.outcome.reason
    assert done.summary["bus_restarts"] == 1 and done.summary["restarts_unasked"] == 0
    check_trained_once(done, STEPS)
    assert [int(line["step"]) for line in done.lines("metrics.jsonl")] == list(range(1, STEPS + 1))


def test_an_actor_that_was_killed_goes_on_from_its_last_step(run: Runner) -> None:
    """behaviour: B12 B16"""
    done = run(*EASY, f"run.steps={STEPS}", during=kill_once(lambda status: status["step"] >= 5, "actor"))
    assert done.outcome.state == "finished", done.outcome.reason
    restarts = {view["instance"]: view["restarts"] for view in done.seen[-1]["roles"]}
    assert restarts.pop("actor") == 1 and not any(restarts.values())
    check_trained_once(done, STEPS)
    assert [int(line["step"]) for line in done.lines("metrics.jsonl")] == list(range(1, STEPS + 1))
    [actor] = [view for view in done.seen[-1]["roles"] if view["instance"] == "actor"]
    assert actor["counters"]["snapshots_restored"] == 1

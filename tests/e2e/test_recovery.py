"""Processes die while a run goes on; what was trained, and how often, is as if none had."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from e2e_support import EASY, Finished, Runner, kill_once

from services.dcs.versions import read_versions
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


def both(*kills: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def during(status: dict[str, Any]) -> None:
        for kill in kills:
            kill(status)

    return during


def views_of(done: Finished) -> dict[str, dict[str, Any]]:
    """Each role as the controller saw it last."""
    return {view["instance"]: view for view in done.seen[-1]["roles"]}


def losses(done: Finished) -> list[tuple[float, float, float]]:
    return [(line["loss"], line["grad_norm"], line["reward_mean"]) for line in done.lines("metrics.jsonl")]


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


@pytest.mark.parametrize("process", ["EngineHost", pytest.param("StorageHost", marks=pytest.mark.slow)])
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


OLD_STATE = ("actor.snapshot_every=0", "actor.checkpoint_every=10")
"""The newest state of an actor that dies is up to ten steps old."""


def at_step(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: bool(status["step"] >= step)


def between_checkpoints(status: dict[str, Any]) -> bool:
    """Some steps after the last one and well before the next, also when the status is a step old."""
    return status["step"] > 10 and 3 <= status["step"] % 10 <= 7


def test_what_was_trained_after_the_newest_state_is_trained_again_from_the_same_rows(run: Runner) -> None:
    """behaviour: B10 B12 B16"""
    done = run(*EASY, *OLD_STATE, f"run.steps={STEPS}", during=kill_once(between_checkpoints, "actor"))
    assert done.outcome.state == "finished", done.outcome.reason
    check_trained_once(done, STEPS)
    views = views_of(done)
    again = views["actor"]["counters"]["steps_trained_again"]
    assert 1 <= again <= 10 and views["rollout"]["counters"]["steps_taken_back"] == again
    assert views["actor"]["counters"]["snapshots_restored"] == 1, "the one that the last checkpoint was made from"
    assert done.summary["bus_restarts"] == 0 and not views["rollout"]["counters"]["groups_readmitted"]
    versions = read_versions(done.folder / "versions.jsonl")
    assert [line.version for line in versions] == [line.step for line in versions] == list(range(STEPS + 1))
    with Ledger(done.folder / "ledger.sqlite", read_only=True) as ledger:
        lineage = ledger.newest_lineage()
        assert lineage.number == 1 and lineage.through_step % 10 == 0
        back = ledger.taken_back()
        assert len(back) == again * GROUPS
        order = {terminal.group_id: terminal.step for terminal in ledger.terminals(TerminalState.TRAINED)}
    steps = [order[group_id] for group_id in back]
    assert steps == sorted(steps) and steps[0] == lineage.through_step + 1, "in their old order"


def test_what_was_trained_after_the_newest_state_is_made_again_when_its_rows_are_lost_too(run: Runner) -> None:
    """behaviour: B10 B12 B16"""
    killers = both(kill_bus(between_checkpoints, "EngineHost"), kill_once(between_checkpoints, "actor"))
    done = run(*EASY, *OLD_STATE, f"run.steps={STEPS}", during=killers)
    assert done.outcome.state == "finished", done.outcome.reason
    check_trained_once(done, STEPS)
    assert done.summary["restarts_unasked"] == 1, "of the actor"
    counters = views_of(done)["rollout"]["counters"]
    assert counters["groups_readmitted"] >= counters["steps_taken_back"] * GROUPS
    versions = read_versions(done.folder / "versions.jsonl")
    numbers, steps = [line.version for line in versions], [line.step for line in versions]
    assert numbers == list(range(len(numbers))) and len(numbers) > STEPS + 1, "the older policy has its own version"
    back = [later for earlier, later in itertools.pairwise(steps) if later <= earlier]
    assert len(back) == 1 and back[0] % 10 == 0


DETERMINISTIC = (
    "run.deterministic=true",
    "run.max_staleness=0",
    "rollout.instances=1",
    "rollout.engine.slots=1",
    "run.steps=24",
    "actor.checkpoint_every=4",
)


@pytest.mark.slow
@pytest.mark.parametrize("snapshots", [True, False])
def test_a_deterministic_run_has_the_same_losses_with_and_without_crashes(run: Runner, snapshots: bool) -> None:
    """behaviour: B12"""
    settings = (*EASY, *DETERMINISTIC, *([] if snapshots else ["actor.snapshot_every=0"]))
    unbroken = run(*settings)
    assert unbroken.outcome.state == "finished", unbroken.outcome.reason
    killers = both(
        kill_once(at_step(4), "rollout-0"),
        kill_once(at_step(7), "actor"),
        kill_once(at_step(11), "reward"),
        kill_bus(at_step(14), "EngineHost"),
        kill_once(at_step(18), "actor"),
        kill_once(at_step(21), "rollout"),
    )
    broken = run(*settings, during=killers)
    assert broken.outcome.state == "finished", broken.outcome.reason
    check_trained_once(broken, 24)
    assert losses(broken) == losses(unbroken)

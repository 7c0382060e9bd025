"""Kills, stops and lost messages on the simulated clock: what was consumed, and how often, is as if none had been."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from relax.config.sections import RolloutArgs
from services.simulation.hub import Network
from services.simulation.survival import Scenario, compare, survive

KILLS = 30


def args(**run: Any) -> RolloutArgs:
    shared = {
        "groups_per_step": 4,
        "group_size": 3,
        "steps": 1_000_000,
        "use_ref": True,
        "max_staleness": 1,
        "bus": {"lease_ttl_s": 10, "rpc_timeout_s": 5},
        **run,
    }
    return RolloutArgs.model_validate(
        {"run": shared, "rollout": {"data": {"task": "copy"}, "filter": {"kind": "accuracy_band"}}}
    )


@pytest.mark.parametrize(
    ("seed", "lost_share", "run"),
    [
        (1, 0.0, {}),
        (11, 0.03, {}),
        (3, 0.03, {"max_staleness": 0}),
        (4, 0.05, {"max_staleness": 2, "overdue": "wait", "use_ref": False}),
    ],
)
def test_a_run_whose_processes_die_consumes_what_an_unbroken_one_does(
    seed: int, lost_share: float, run: dict[str, Any]
) -> None:
    """behaviour: B12 B15 B16

    Actor, manager, instance, reward and ref at any time and at their points, and the bus; calls and answers get lost,
    and processes stand still for longer than their leases live. Some actors lose their snapshot with their lives: what
    they had trained since the last checkpoint is trained again, from the same rows or from new ones.
    """
    scenario = Scenario.for_kills(args(**run), KILLS, seed, lost_share=lost_share, instances=2)
    unbroken = survive(replace(scenario, network=Network()), 0)
    struck = survive(scenario, KILLS)
    assert unbroken.broken == [] and len(unbroken.consumed) == scenario.groups
    assert compare(struck, unbroken) == []
    assert struck.kills == KILLS and struck.restarts["bus"] > 0 and struck.restarts["actor"] > 0
    assert (struck.lost_answers > 0) == (lost_share > 0)
    assert struck.states_lost > 0


def test_what_a_dead_process_held_is_given_out_as_soon_as_its_successor_is_there() -> None:
    """behaviour: B12 B18

    Leases that never expire by themselves.
    """
    forever = args(bus={"lease_ttl_s": 1e6, "rpc_timeout_s": 5})
    scenario = Scenario.for_kills(forever, KILLS, 5, lost_share=0.0, instances=2)
    unbroken, struck = survive(scenario, 0), survive(scenario, KILLS)
    assert compare(struck, unbroken) == []


def test_the_same_seed_gives_the_same_run() -> None:
    scenario = Scenario.for_kills(args(), 8, 7, lost_share=0.02, instances=2)
    first, second = survive(scenario, 8), survive(scenario, 8)
    assert (first.simulated_s, first.learnt, first.by_fault) == (second.simulated_s, second.learnt, second.by_fault)

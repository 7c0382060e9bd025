"""Which fault strikes whom and when, what is said of it, and when a run counts as broken."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace

import pytest

from relax.config.faults import FaultAction, Point
from relax.control.chaos import (
    HOSTS,
    ChaosError,
    Conductor,
    Ended,
    Fault,
    How,
    Planned,
    Seen,
    View,
    default_pool,
    known_faults,
    parse_faults,
    plan,
    verdict,
)

ROLES = ("actor", "dcs", "rollout", "instance", "reward", "ref")
FINE = Ended(
    state="finished",
    reason=None,
    violations=(),
    steps=2,
    reward_last=0.95,
    produced=8,
    trained=6,
    dropped=2,
    queued=0,
    admitted=4,
    next_seq=4,
    trained_samples=6,
    trained_by_step={1: 2, 2: 1},
)


def view(step: int = 10, **seen: Seen) -> View:
    return View(step, True, {name.replace("_", "-"): one for name, one in seen.items()})


def up(role: str, pid: int, progress: object = 0, state: str = "running") -> Seen:
    return Seen(role, pid, state, progress)


def planned(name: str, step: int = 1, number: int = 0, pick: float = 0.0) -> Planned:
    return Planned(number, known_faults()[name], step, pick)


def test_the_plan_follows_from_the_seed_and_lies_within_the_run() -> None:
    pool = default_pool(ROLES)
    first = plan(pool, 40, 1, 320)
    assert first == plan(pool, 40, 1, 320) != plan(pool, 40, 2, 320)
    assert len(first) == 40 and [item.step for item in first] == sorted(item.step for item in first)
    assert first[0].step >= 1 and first[-1].step <= 0.86 * 320
    assert set(map(str, pool)) == {str(item.fault) for item in first}, "each comes up before one comes twice"
    roles = [item.fault.role for item in first]
    assert sum(a == b for a, b in itertools.pairwise(roles)) <= 1


def test_scheduled_faults_come_at_their_steps_beside_the_drawn_ones() -> None:
    pool, scheduled = parse_faults("kill:actor, hang:ref@12,kill:dcs:dcs_mid_publish@3", ROLES)
    assert (list(map(str, pool)), [(str(fault), step) for fault, step in scheduled]) == (
        ["kill:actor"],
        [("hang:ref", 12), ("kill:dcs:dcs_mid_publish", 3)],
    )
    both = plan(pool, 2, 1, 20, scheduled)
    assert Counter(str(item.fault) for item in both) == {
        "kill:actor": 2,
        "hang:ref": 1,
        "kill:dcs:dcs_mid_publish": 1,
    }
    with pytest.raises(ChaosError, match=r"after the last step, 10: hang:ref@12"):
        plan(pool, 2, 1, 10, scheduled)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil:actor", "unknown fault 'kil:actor': did you mean 'kill:actor'?"),
        ("kill:ref", "this run has no ref"),
        ("kill:actor@0", "after @ comes a step from 1 on"),
        ("kill:actor@soon", "after @ comes a step"),
        (" , ", "no fault is named"),
    ],
)
def test_faults_that_cannot_be_injected_are_refused(text: str, words: str) -> None:
    """behaviour: B40"""
    with pytest.raises(ChaosError, match=words.replace("?", r"\?")):
        parse_faults(text, [role for role in ROLES if role != "ref"])


def test_a_run_without_a_role_is_not_struck_there() -> None:
    there = {fault.role for fault in default_pool(("actor", "dcs", "rollout"))}
    assert there == {"actor", "dcs", "rollout", "save", *HOSTS}


def test_faults_at_points_tell_the_process_what_to_do() -> None:
    point = known_faults()["hang:instance:mid_put"].fault_point
    assert point is not None
    assert (point.point, point.role, point.action, point.at) == (Point.MID_PUT, "instance", FaultAction.HANG, None)
    full = Fault(How.FULL, "save").fault_point
    assert full is not None and (full.role, full.action) == ("dcs", FaultAction.NO_SPACE)
    assert known_faults()["kill:actor"].fault_point is None


def test_a_role_is_left_alone_until_it_has_got_on_after_its_last_fault() -> None:
    conductor = Conductor([planned("kill:ref", 1), planned("kill:ref", 2, 1)])
    before = view(ref=up("ref", 1))
    due = conductor.due(before)
    assert due is not None and due[1] == "ref"
    strike = conductor.struck(*due, before, 5.0)
    for now_s, seen in (
        (6.0, up("ref", 1, state="lost")),
        (7.0, up("ref", 2, state="starting")),
        (8.0, up("ref", 2, progress=3)),
    ):
        conductor.observe(view(ref=seen), now_s)
        assert conductor.due(view(ref=seen)) is None
    conductor.observe(view(ref=up("ref", 2, progress=4)), 9.0)
    assert (strike.detected_s, strike.recovered_s, strike.progressed_s) == (6.0, 8.0, 9.0)
    assert conductor.due(view(ref=up("ref", 2))) is not None
    assert conductor.restarts == {"ref": 1} and conductor.unasked() == {}


def test_nothing_is_struck_before_its_step_and_not_more_at_once_than_allowed() -> None:
    everybody = view(5, actor=up("actor", 1), ref=up("ref", 2), reward=up("reward", 3))
    conductor = Conductor([planned("kill:actor", 6)])
    assert conductor.due(everybody) is None
    assert conductor.due(View(6, False, everybody.seen)) is None, "a run that is coming up or has ended"
    conductor = Conductor([planned(f"kill:{role}", 1, n) for n, role in enumerate(("actor", "ref", "reward"))], 2)
    for _ in range(2):
        due = conductor.due(everybody)
        assert due is not None
        conductor.struck(*due, everybody, 1.0)
    assert conductor.due(everybody) is None


def test_a_victim_is_picked_among_the_instances_that_work() -> None:
    both = view(rollout_0=up("instance", 1), rollout_1=up("instance", 2), rollout=up("rollout", 3))
    names = [Conductor([planned("kill:instance", pick=pick)]).due(both) for pick in (0.1, 0.9)]
    assert [name for due in names if due for name in due[1:]] == ["rollout-0", "rollout-1"]
    one = view(rollout_0=up("instance", 1, state="waiting_weights"), rollout_1=up("instance", 2))
    due = Conductor([planned("kill:instance", pick=0.1)]).due(one)
    assert due is not None and due[1] == "rollout-1"


def test_a_restart_that_no_fault_explains_is_told() -> None:
    """behaviour: B34"""
    conductor = Conductor([planned("kill:bus")])
    first = view(bus=up("bus", 1), store=up("store", 2), ref=up("ref", 3))
    conductor.observe(first, 0.0)
    due = conductor.due(first)
    assert due is not None
    conductor.struck(*due, first, 1.0)
    conductor.observe(view(bus=up("bus", 11, 5), store=up("store", 12), ref=up("ref", 13)), 2.0)
    conductor.observe(view(bus=up("bus", 11, 6), store=up("store", 12), ref=up("ref", 13)), 3.0)
    assert conductor.unasked() == {"ref": 1}, "engine and storage of a bus are made anew together"
    assert verdict(FINE, conductor, None).broken == ["ref restarted unasked, 1 times"]


def test_a_fault_whose_point_was_not_reached_counts_as_not_injected() -> None:
    conductor = Conductor([planned("kill:actor:before_commit"), planned("kill:ref", 1, 1)])
    here = view(actor=up("actor", 1))
    due = conductor.due(here)
    assert due is not None
    conductor.struck(*due, here, 1.0, armed=True)
    conductor.observe(here, 2.0)
    assert verdict(FINE, conductor, None).broken == [
        "kill:ref was not injected: its role was not ready",
        "kill:actor:before_commit was not injected: actor did not pass the point",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": "failed", "reason": "x"}, "the run failed: x"),
        ({"violations": ("reward",)}, "not met: reward"),
        ({"queued": 1}, "samples do not add up"),
        ({"trained_samples": 5}, "the ledger has 5 trained samples, the bus 6"),
        ({"next_seq": 5}, "5 groups were numbered and 4 are in the ledger"),
        ({"open": 1}, "1 of 4 admitted groups have no end"),
        ({"refused": 2}, "2 groups came to a second, different end"),
        ({"trained_by_step": {2: 1}}, r"steps without a trained group: \[1\]"),
        ({"reward_last": 0.5}, "reward 0.5 at the end, at least 0.9"),
    ],
)
def test_what_does_not_hold_at_the_end_is_told(change: dict[str, object], words: str) -> None:
    """behaviour: B12 B16"""
    assert verdict(FINE, Conductor([]), 0.9).ok
    [sentence, *_] = verdict(replace(FINE, **change), Conductor([]), 0.9).broken  # type: ignore[arg-type]
    assert re.search(words, sentence)


def test_what_the_faults_explain_is_not_held_against_the_run() -> None:
    conductor = Conductor([planned("full:save")])
    here = view(dcs=up("dcs", 1))
    due = conductor.due(here)
    assert due is not None
    conductor.ended(conductor.struck(*due, here, 1.0), here, 1.5)
    told = ("replicas restarted unasked: 4", "checkpoints not saved: 1; no space", "no step was trained")
    assert verdict(replace(FINE, violations=told), conductor, None).broken == ["not met: no step was trained"]
    assert len(verdict(replace(FINE, violations=told), Conductor([]), None).broken) == 2


@pytest.mark.parametrize(
    ("state", "ends_s", "broken"), [("finished", 12.0, 0), ("finished", 90.0, 1), ("failed", 12.0, 2)]
)
def test_a_victim_that_the_end_of_the_run_overtook_is_not_held_against_it(
    state: str, ends_s: float, broken: int
) -> None:
    conductor = Conductor([planned("kill:instance")])
    before = view(rollout_0=up("instance", 7))
    due = conductor.due(before)
    assert due is not None
    conductor.struck(*due, before, 10.0)
    conductor.observe(view(), ends_s)
    assert len(verdict(replace(FINE, state=state), conductor, None).broken) == broken

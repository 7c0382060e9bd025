"""The watchdog's sentences."""

from __future__ import annotations

import pytest

from relax.control.watchdog import BusSnapshot, LeaseSnapshot, ProgressTracker, RoleSnapshot, find_stall

NOW_S = 1000.0
ROLES = [
    RoleSnapshot("rollout", "rollout-0", NOW_S - 61),
    RoleSnapshot("reward", "reward-0", NOW_S - 70),
    RoleSnapshot("actor", "actor-0", NOW_S - 65, "waiting for rows"),
]


def stall(bus: BusSnapshot, roles: list[RoleSnapshot] = ROLES, stall_s: float = 60.0):  # type: ignore[no-untyped-def]
    found = find_stall(roles, bus, NOW_S, stall_s)
    assert found is not None
    return found


def test_leased_prompts_are_named_with_their_holder_and_age() -> None:
    """behaviour: B46"""
    bus = BusSnapshot(
        rows={"prompts": 32, "samples": 0},
        ready={"rollout": 0, "reward": 0, "actor": 0},
        leases=[LeaseSnapshot("rollout", "rollout-0", 32, NOW_S - 61)],
        oldest_s={"prompts": NOW_S - 90},
    )
    found = stall(bus)
    assert found.sentences == (
        "prompts queue: 32 rows, the oldest 90 s old; 0 ready for rollout; "
        "32 rows leased for rollout by rollout-0 since 61 s",
        "samples queue: 0 rows; 0 ready for reward; reward-0 idle; 0 ready for actor; actor-0 waiting for rows",
    )
    assert found.waits == (("actor", "rollout-0"),)
    assert found.text().startswith("nothing moved for 61 s: actor waits for rollout-0. prompts queue")


@pytest.mark.parametrize(
    ("bus", "waits"),
    [
        (BusSnapshot({"samples": 8}, {"reward": 8}), "actor waits for reward, which leases nothing of 8 ready rows"),
        (
            BusSnapshot({"samples": 8}, {"ref": 0}, [LeaseSnapshot("ref", "ref-0", 8, 0.0)]),
            "actor waits for ref-0",
        ),
        (BusSnapshot({"samples": 8}, {"actor": 8}), "the run waits for actor, which leases nothing of 8 ready rows"),
        (BusSnapshot({"samples": 8}, {}), "actor waits for the verdict on the rows in samples"),
        (BusSnapshot({"prompts": 4}, {"rollout": 4}), "actor waits for rollout, which leases nothing of 4 ready rows"),
        (BusSnapshot({"prompts": 4}, {}), "rollout waits for a version new enough"),
        (BusSnapshot({}, {}), "actor waits for rollout; rollout waits for the prompt source"),
        (BusSnapshot({}, {}, closed=frozenset({"prompts"})), "rollout waits for the prompt source (closed)"),
    ],
)
def test_the_chain_ends_at_whoever_has_work_and_does_not_do_it(bus: BusSnapshot, waits: str) -> None:
    """behaviour: B46"""
    assert waits in stall(bus).text()


def test_one_moving_replica_is_no_stall() -> None:
    """behaviour: B46"""
    bus = BusSnapshot({}, {})
    assert find_stall(ROLES, bus, NOW_S, stall_s=61.0) is not None
    assert find_stall(ROLES, bus, NOW_S, stall_s=61.1) is None
    assert find_stall([], bus, NOW_S, stall_s=1.0) is None


def test_progress_is_a_counter_that_moves_and_not_a_report_that_arrives() -> None:
    """behaviour: B46"""
    tracker = ProgressTracker()
    assert tracker.update("actor", "actor-0", {"steps": 0}, 1.0) == 1.0
    assert tracker.update("actor", "actor-0", {"steps": 0}, 5.0) == 1.0
    assert tracker.update("actor", "actor-0", {"steps": 1}, 9.0) == 9.0
    assert tracker.update("actor", "actor-1", {"steps": 1}, 11.0) == 11.0
    tracker.forget("actor", "actor-0")
    assert tracker.update("actor", "actor-0", {"steps": 1}, 12.0) == 12.0

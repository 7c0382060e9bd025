"""Who has a fault, and who only waits or is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax.config.recovery import RecoveryConfig, RoleDeadlines
from relax.control.detection import (
    ProgressTimes,
    ReplicaHealth,
    Throughput,
    find_faults,
    find_stragglers,
    progress_limit_s,
)
from relax.control.recovery import Fault

CONFIG = RecoveryConfig(silence_s=10.0, progress_floor_s=20.0, progress_factor=10.0, start_s=100.0, slow_factor=4.0)
WELL = ReplicaHealth("reward", "reward", "r1", "running", silent_s=1.0, still_s=1.0, median_s=1.0)


def fault_of(replica: ReplicaHealth, config: RecoveryConfig = CONFIG) -> Fault | None:
    found = find_faults([replica], config)
    return found[0].fault if found else None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"silent_s": 10.0}, Fault.SILENT),
        ({"still_s": 20.0}, Fault.HUNG),
        ({"still_s": 20.0, "median_s": 5.0}, Fault.SLOW),
        ({"still_s": 50.0, "median_s": 5.0}, Fault.HUNG),
        ({"still_s": 50.0, "median_s": None}, None),
        ({"still_s": 100.0, "median_s": None}, Fault.HUNG),
        ({"error": "Traceback ...\nValueError: no"}, Fault.ERROR),
        ({"gone": True, "silent_s": 50.0}, Fault.REPLICA_DEAD),
        ({"state": "done", "still_s": 500.0}, None),
        ({"state": "done", "silent_s": 10.0}, Fault.SILENT),
        ({"state": "starting", "silent_s": 50.0}, None),
        ({"state": "starting", "silent_s": 100.0}, Fault.SILENT),
        ({"role": "dcs", "still_s": 500.0}, None),
    ],
)
def test_silence_standing_still_and_errors_are_told_apart(change: dict[str, object], fault: Fault | None) -> None:
    """behaviour: B44 B46"""
    assert fault_of(replace(WELL, **change)) is fault  # type: ignore[arg-type]


def test_a_role_that_waits_for_another_is_not_hung_however_long_it_takes() -> None:
    """behaviour: B46"""
    times = ProgressTimes()
    times.works(0.0)
    times.moved(1.0)
    times.waits()
    assert times.still_s(1000.0) == 0.0
    times.works(1000.0)
    assert times.still_s(1005.0) == 5.0, "its own time begins when it has what it waited for"


def test_the_deadline_follows_the_measured_times_and_a_fixed_one_holds() -> None:
    times = ProgressTimes()
    for second in range(0, 50, 10):
        times.moved(float(second))
    assert times.median_s() == 10.0
    assert progress_limit_s("actor", times.median_s(), CONFIG) == 100.0
    assert progress_limit_s("actor", 0.1, CONFIG) == CONFIG.progress_floor_s
    fixed = CONFIG.model_copy(update={"deadlines": {"actor": RoleDeadlines(progress_s=7.0)}})
    assert progress_limit_s("actor", 10.0, fixed) == 7.0 and progress_limit_s("ref", 10.0, fixed) == 100.0


def test_deadlines_are_by_role() -> None:
    own = CONFIG.model_copy(update={"deadlines": {"reward": RoleDeadlines(silence_s=3.0)}})
    assert fault_of(replace(WELL, silent_s=4.0), own) is Fault.SILENT
    assert fault_of(replace(WELL, role="ref", silent_s=4.0), own) is None


def test_a_straggler_is_one_that_stays_far_below_its_peers() -> None:
    """behaviour: B18"""
    assert find_stragglers({"a": 10.0, "b": 9.0, "c": 2.0}, 0.4) == {"c": pytest.approx(2.0 / 9.5)}
    assert find_stragglers({"a": 10.0, "b": 9.0, "c": 6.0}, 0.4) == {}
    assert find_stragglers({"a": 10.0, "b": None}, 0.4) == {}, "alone, nobody is slow"


def test_throughput_is_by_running_request_and_needs_a_full_window_of_work() -> None:
    """behaviour: B18"""
    busy, half, idle = Throughput(), Throughput(), Throughput()
    for second in range(11):
        busy.observe(float(second), 80.0 * second, 8.0 * second, 10.0)
        half.observe(float(second), 40.0 * second, 4.0 * second, 10.0)
        idle.observe(float(second), 0.1 * second, 0.01 * second, 10.0)
        if second < 10:
            assert busy.rate(10.0) is None
    assert busy.rate(10.0) == half.rate(10.0) == 10.0, "fewer requests are no slowness"
    assert idle.rate(10.0) is None
    for second in range(11, 30):
        busy.observe(float(second), 800.0, 8.0 * second, 10.0)
    assert busy.rate(10.0) == 0.0

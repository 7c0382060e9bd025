"""The table of live state."""

from __future__ import annotations

import pytest

from relax.telemetry.live import LIVE, LiveSample, check_live
from relax.telemetry.metrics import METRICS, Kind

REPLICA = {"role": "actor", "instance": "actor"}


def test_live_and_step_metrics_share_no_name() -> None:
    """behaviour: B42"""
    names = [metric.prometheus for metric in (*METRICS.values(), *LIVE.values())]
    assert len(set(names)) == len(names)
    assert LIVE["swap_stall_s"].prometheus == "relax_swap_stall_seconds_total"
    assert all(metric.help and metric.unit for metric in LIVE.values())


def test_a_utilisation_over_one_is_not_exported_and_is_named() -> None:
    """behaviour: B42"""
    full = LiveSample("time_share", 1.0, {**REPLICA, "kind": "work"})
    over = LiveSample("time_share", 1.01, {**REPLICA, "kind": "idle"})
    good, problems = check_live([full, over])
    assert good == [full]
    assert problems == {
        "time_share actor actor idle": "time_share actor actor idle: time_share is 1.01; a share lies between 0 and 1"
    }
    assert LIVE["time_share"].kind is Kind.SHARE


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (LiveSample("unheard_of", 1.0), "unknown live metric"),
        (LiveSample("heartbeat_age_s", 1.0, {"role": "actor"}), "has the labels"),
        (LiveSample("heartbeat_age_s", float("nan"), REPLICA), "no finite number"),
        (LiveSample("restarts", -1.0, REPLICA), "never negative"),
    ],
)
def test_what_the_table_does_not_allow_is_not_exported(sample: LiveSample, problem: str) -> None:
    """behaviour: B42"""
    good, problems = check_live([sample])
    assert good == [] and problem in next(iter(problems.values()))

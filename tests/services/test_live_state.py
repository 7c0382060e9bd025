"""The controller's live state: what becomes a sample, and what a replica's last seconds say."""

from __future__ import annotations

from typing import Any

import pytest

from relax.config.run import RunConfig
from relax.config.sections import ControllerArgs
from relax.control.runstate import RunState
from relax.telemetry.live import ROLE_STATES, RUN_STATES, check_live
from services.controller.api import AdoptionReport, Heartbeat
from services.controller.book import RunBook
from services.controller.incidents import Incidents
from services.controller.live import LiveState, live_samples
from services.controller.pace import WINDOW_S, Pace


@pytest.fixture
def book() -> RunBook:
    args = ControllerArgs(run=RunConfig(use_ref=False), controller={"heartbeat_timeout_s": 10})  # type: ignore[arg-type]
    return RunBook(args, started_at=0.0)


def beat(role: str, instance: str | None = None, replica: str = "r1", **more: Any) -> Heartbeat:
    split = {"work_s": 1.0, "wait_data_s": 0.0, "wait_weights_s": 0.0, "idle_s": 0.0}
    base: dict[str, Any] = {"state": "running", "waiting_for": "", "counters": {}, "facts": {}, "time_split": split}
    return Heartbeat(role=role, instance=instance or role, replica_id=replica, pid=1, **{**base, **more})


def values(book: RunBook, now: float, incidents: Incidents | None = None) -> dict[tuple[str, ...], float]:
    """(name, *label values) -> value."""
    live = LiveState(
        book, None, RunState.RUNNING, False, incidents or Incidents(), {"wandb": 2}, engine_dtype="float32", now=now
    )
    samples, problems = check_live(live_samples(live))
    assert problems == {}
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert len(found) == len(samples), "two samples of one series"
    return found


def test_roles_and_instances_become_samples_with_their_labels(book: RunBook) -> None:
    """behaviour: B42"""
    book.record_beat(beat("actor", facts={"version": 5}, counters={"rows": 64, "updates_skipped": 1}), 1.0)
    book.record_beat(
        beat("instance", "rollout-0", state="active", facts={"version": 3, "running": 4}, counters={"tokens": 100}), 8.0
    )
    book.record_adoption(AdoptionReport("rollout-0", 3, "d", True, 2e-6, 1e-6, 0.25))
    seen = values(book, now=12.0)
    assert seen["run_state",] == RUN_STATES["running"] and seen["tracker_errors", "wandb"] == 2
    assert seen["role_state", "actor", "actor"] == ROLE_STATES["lost"] and seen["role_up", "actor", "actor"] == 0
    assert seen["heartbeat_age_s", "actor", "actor"] == 11.0
    assert seen["role_state", "instance", "rollout-0"] == ROLE_STATES["active"]
    assert seen["version_behind", "instance", "rollout-0"] == 2 and seen["version_behind", "actor", "actor"] == 0
    assert seen["incidents", "actor", "actor", "update_skipped"] == 1
    assert seen["incidents", "instance", "rollout-0", "adoption_failed"] == 0
    assert ("incidents", "instance", "rollout-0", "update_skipped") not in seen
    assert seen["rows_done", "actor", "actor"] == 64 and seen["running_samples", "instance", "rollout-0"] == 4
    assert seen["adoption_s", "instance", "rollout-0"] == 0.25


def test_totals_go_on_over_a_restart(book: RunBook) -> None:
    """behaviour: B34"""
    book.record_beat(beat("instance", "rollout-0", counters={"tokens": 100, "adoptions_failed": 2}), 1.0)
    book.record_beat(beat("instance", "rollout-0", "r2", counters={"tokens": 10}), 2.0)
    seen = values(book, now=2.0)
    assert seen["generated_tokens", "instance", "rollout-0"] == 110
    assert seen["incidents", "instance", "rollout-0", "adoption_failed"] == 2
    assert seen["restarts", "instance", "rollout-0"] == 1


def test_a_record_counts_the_groups_that_ended_since_the_one_before(book: RunBook) -> None:
    """behaviour: B42"""
    book.record_beat(beat("rollout", counters={"groups_filtered": 3}), 1.0)
    book.record_beat(beat("reward", counters={"reward_calls": 50, "reward_failures": 2}), 1.0)
    first = book.complete_record({"step": 1.0}, {})
    book.record_beat(beat("rollout", counters={"groups_filtered": 4, "groups_dropped": 1}), 2.0)
    second = book.complete_record({"step": 2.0}, {})
    assert (first["groups_filtered"], first["groups_dropped"]) == (3, 0)
    assert (second["groups_filtered"], second["groups_dropped"]) == (1, 1)
    assert (second["reward_calls"], second["reward_failures"], second["reward_retries"]) == (50, 2, 0)


def test_an_incident_is_counted_when_it_begins_and_again_when_it_comes_back() -> None:
    incidents = Incidents()
    assert incidents.observe("role_lost", ["actor"]) == {"actor"}
    assert incidents.observe("role_lost", ["actor", "ref"]) == {"ref"}
    incidents.observe("role_lost", [])
    incidents.observe("role_lost", ["actor"])
    incidents.observe("stall", ["nothing moved"])
    assert incidents.counts == {"role_lost": 3, "stall": 1}


def test_the_shares_of_the_last_seconds_add_up_to_one_and_forget_what_is_older() -> None:
    """behaviour: B42"""
    pace = Pace()
    assert pace.shares() == {} and pace.tokens_per_s() == 0.0
    for second in range(100):
        pace.observe({"work_s": float(second), "idle_s": 0.0}, tokens=10.0 * second)
    assert pace.shares() == {"work_s": 1.0, "idle_s": 0.0} and pace.tokens_per_s() == 10.0
    for second in range(int(WINDOW_S) + 1):
        pace.observe({"work_s": 99.0, "idle_s": float(second)}, tokens=990.0)
    assert pace.shares() == {"work_s": 0.0, "idle_s": 1.0} and pace.tokens_per_s() == 0.0

"""The controller's account of the run."""

from __future__ import annotations

from typing import Any

import pytest

from relax.config.run import RunConfig
from relax.config.sections import ControllerArgs
from services.controller.api import AdoptionReport, Heartbeat
from services.controller.book import RunBook
from services.controller.closing import final_facts


@pytest.fixture
def book() -> RunBook:
    args = ControllerArgs(run=RunConfig(use_ref=False), controller={"heartbeat_timeout_s": 10})  # type: ignore[arg-type]
    return RunBook(args, started_at=0.0)


def beat(role: str, replica: str = "r1", instance: str | None = None, **more: Any) -> Heartbeat:
    base: dict[str, Any] = {
        "role": role,
        "instance": instance or role,
        "replica_id": replica,
        "pid": 1,
        "state": "running",
        "waiting_for": "",
        "counters": {},
        "facts": {},
        "time_split": {"work_s": 1.0},
    }
    return Heartbeat(**{**base, **more})


def adoption(gap: float, ok: bool = True) -> AdoptionReport:
    return AdoptionReport("rollout-0", 1, "d", ok, gap, gap / 10, 0.1)


def test_another_replica_of_a_role_is_a_restart_and_its_time_is_added(book: RunBook) -> None:
    """behaviour: B34"""
    book.record_beat(beat("reward"), 1.0)
    book.record_beat(beat("reward", counters={"rows": 3}), 2.0)
    assert book.restarts() == 0
    book.record_beat(beat("reward", "r2", time_split={"work_s": 0.5}), 3.0)
    assert book.restarts() == 1
    assert book.role_time()["reward"]["work_s"] == 1.5


def test_what_went_wrong_is_told_over_restarts_of_the_role(book: RunBook) -> None:
    book.record_beat(beat("actor", counters={"checkpoints_failed": 1}), 1.0)
    book.record_beat(beat("reward", counters={"spans_dropped": 3}), 1.0)
    book.record_beat(beat("actor", "r2", counters={"checkpoints_failed": 1, "spans_dropped": 2}), 2.0)
    facts = final_facts(book, None, 1.0)
    assert (facts.checkpoints_failed, facts.spans_dropped) == (2, 5)


def test_progress_is_a_counter_that_moves_not_a_heartbeat(book: RunBook) -> None:
    """behaviour: B46"""
    book.record_beat(beat("actor", counters={"steps": 1}), 1.0)
    book.record_beat(beat("actor", counters={"steps": 1}), 5.0)
    assert book.last_progress_at() == 1.0
    book.record_beat(beat("actor", counters={"steps": 2}), 7.0)
    assert book.last_progress_at() == 7.0


def test_silence_is_a_loss(book: RunBook) -> None:
    book.record_beat(beat("actor"), 1.0)
    assert book.lost(10.0) == [] and book.lost(11.5) == ["actor"]
    assert book.views(11.5)[0].state == "lost"


def test_a_run_is_up_only_with_weights_in_an_engine(book: RunBook) -> None:
    for role in ("dcs", "rollout", "reward"):
        book.record_beat(beat(role), 1.0)
    assert book.missing() == ["actor", "a rollout instance with weights"]
    book.record_beat(beat("actor"), 1.0)
    book.record_beat(beat("instance", instance="rollout-0", facts={"adoption_error": "digest differs"}), 1.0)
    assert book.missing() == ["a rollout instance with weights (digest differs)"]
    book.record_beat(beat("instance", instance="rollout-0", facts={"version": 0}), 2.0)
    assert book.missing() == []


def test_a_repeated_step_report_is_ignored(book: RunBook) -> None:
    assert book.record_step({"step": 1.0}) and not book.record_step({"step": 1.0}) and book.record_step({"step": 2.0})


def test_a_step_carries_the_engine_time_since_the_one_before_also_over_an_engine_restart(book: RunBook) -> None:
    def at(first: float, second: float) -> float:
        book.record_beat(beat("instance", instance="rollout-0", facts={"busy_s": first}), 1.0)
        book.record_beat(beat("instance", instance="rollout-1", facts={"busy_s": second}), 1.0)
        return book.complete_record({"step": 1.0}, {})["engine_busy_s"]

    assert [at(1.0, 3.0), at(2.0, 4.0), at(0.0, 4.0), at(1.0, 4.0)] == [2.0, 1.0, 0.0, 0.5]


def test_a_gap_above_the_limit_ends_the_run_with_both_numbers(book: RunBook) -> None:
    """behaviour: B8"""
    book.record_adoption(adoption(0.5))
    assert book.fatal() is None
    limited = RunBook(
        ControllerArgs(run=RunConfig(), controller={"logprob_gap_limit": 0.1}),  # type: ignore[arg-type]
        started_at=0.0,
    )
    limited.record_adoption(adoption(0.05))
    assert limited.fatal() is None
    limited.record_adoption(adoption(0.5))
    assert "0.5" in (limited.fatal() or "") and "logprob_gap_limit 0.1" in (limited.fatal() or "")


def test_a_wrong_digest_is_kept_although_later_ones_are_right(book: RunBook) -> None:
    """behaviour: B2"""
    book.record_adoption(adoption(0.0, ok=False))
    book.record_adoption(adoption(0.0))
    assert book.digest_failures == 1


def test_the_first_reason_of_a_role_to_end_the_run_is_told_with_its_name(book: RunBook) -> None:
    book.record_beat(beat("reward", fatal="60 % of the last 100 reward calls failed"), 1.0)
    assert book.fatal() == "reward: 60 % of the last 100 reward calls failed"


def test_a_run_is_done_when_trainer_manager_and_reward_are(book: RunBook) -> None:
    for role in ("actor", "rollout"):
        book.record_beat(beat(role, state="done"), 1.0)
    assert not book.all_done()
    book.record_beat(beat("reward", state="done"), 1.0)
    assert book.all_done()


def test_weights_that_no_instance_can_adopt_end_the_run(book: RunBook) -> None:
    """behaviour: B4"""
    failing: dict[str, Any] = {"counters": {"adoptions_failed": 10}, "facts": {"adoption_error": "digest differs"}}
    book.record_beat(beat("instance", instance="rollout-0", **failing), 1.0)
    assert "digest differs" in (book.fatal() or "")
    book.record_beat(beat("instance", instance="rollout-1", counters={"adoptions_failed": 9}), 1.0)
    assert book.fatal() is None, "the other may still succeed"
    holds = {**failing, "facts": {"version": 3, "adoption_error": "digest differs"}}
    for name in ("rollout-0", "rollout-1"):
        book.record_beat(beat("instance", instance=name, **holds), 2.0)
    assert book.fatal() is None, "they hold older weights"


def test_a_heartbeat_that_was_held_up_changes_nothing(book: RunBook) -> None:
    """behaviour: B34"""
    book.record_beat(beat("reward", counters={"rows": 3}, number=7, started_s=10.0), 1.0)
    book.record_beat(beat("reward", counters={"rows": 2}, number=6, started_s=10.0), 2.0)
    assert book.counter("reward", "rows") == 3
    book.record_beat(beat("reward", "r2", counters={"rows": 1}, number=1, started_s=20.0), 3.0)
    book.record_beat(beat("reward", "r1", counters={"rows": 4}, number=8, started_s=10.0), 4.0)
    assert book.restarts() == 1 and book.replicas["reward"].beat.replica_id == "r2"

"""Records of what the controller does."""

from __future__ import annotations

import json

import pytest

from relax.control.operations import IllegalOperationChange, Incident, Operation, OperationState

NEW = Operation("op-1", "restart_replica", "reward", "silent: no heartbeat", 1.0, incident="inc-1")


def test_an_operation_keeps_its_steps_with_their_times() -> None:
    done = NEW.start(2.0).step("kill", 3.0, "process 7").step("wait", 4.0).succeed(6.0)
    assert [(step.name, step.begin_s, step.end_s) for step in done.steps] == [("kill", 3.0, 4.0), ("wait", 4.0, 6.0)]
    assert (done.created_s, done.started_s, done.ended_s, done.ended) == (1.0, 2.0, 6.0, True)


def test_what_has_ended_does_not_change() -> None:
    for ended in (NEW.start(2.0).succeed(3.0), NEW.start(2.0).fail(3.0, "no"), NEW.cancel(2.0, "not needed")):
        for change in (
            lambda op: op.start(4.0),
            lambda op: op.succeed(4.0),
            lambda op: op.fail(4.0, "x"),
            lambda op: op.cancel(4.0, "x"),
            lambda op: op.step("x", 4.0),
        ):
            with pytest.raises(IllegalOperationChange, match="op-1"):
                change(ended)


def test_nothing_succeeds_that_was_not_begun_and_nothing_fails_without_a_reason() -> None:
    with pytest.raises(IllegalOperationChange):
        NEW.succeed(2.0)
    with pytest.raises(IllegalOperationChange):
        NEW.step("kill", 2.0)
    with pytest.raises(ValueError, match="error"):
        NEW.start(2.0).fail(3.0, "")


def test_records_survive_json() -> None:
    failed = NEW.start(2.0).step("kill", 3.0).fail(4.0, "no such process")
    assert Operation.from_json(json.loads(json.dumps(failed.to_json()))) == failed
    assert failed.state is OperationState.FAILED
    incident = Incident("inc-1", "silent", "reward", "reward", 1.0, "no heartbeat", last_progress_s=4.0)
    assert Incident.from_json(json.loads(json.dumps(incident.to_json()))) == incident

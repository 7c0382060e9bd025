"""What the controller keeps over its own death."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax.config.run import RunConfig
from relax.config.sections import ControllerArgs
from relax.control.operations import Incident, OperationState
from relax.control.runstate import RunState, RunStatus
from relax.telemetry.run_folder import RunFolder
from services.controller.api import AdoptionReport, EvalReport, Heartbeat
from services.controller.book import RunBook
from services.controller.keeping import ACCOUNT, open_store, save_phase, take_up
from services.controller.log import KeyConflict, OperationLog, UnknownOperation
from services.controller.scaling import SCALE, Scaling
from services.controller.store import Store, StoreError

ARGS = ControllerArgs(run=RunConfig(use_ref=False))


def beat(instance: str, replica: str = "r1", role: str | None = None, **more: Any) -> Heartbeat:
    base: dict[str, Any] = {"state": "running", "waiting_for": "", "counters": {}, "facts": {}, "time_split": {}}
    return Heartbeat(role=role or instance, instance=instance, replica_id=replica, pid=7, **{**base, **more})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def restarted(folder: RunFolder, cluster: str = "c1", deployed_at: float = 1.0) -> tuple[Store, RunBook, Any]:
    store = open_store(ARGS, folder)
    book = RunBook(ARGS, 100.0)
    return store, book, take_up(store, book, folder, cluster, deployed_at, 100.0)


def first_life(folder: RunFolder) -> Any:
    store, book, kept = restarted(folder)
    assert not kept.returned
    book.record_beat(beat("reward", counters={"rows": 3}), 1.0)
    book.record_beat(beat("reward", "r2", counters={"rows": 2}, started_s=5.5, node="n"), 2.0)
    book.record_beat(beat("rollout-0", role="instance"), 2.0)
    book.record_beat(beat("rollout", facts={"instances": {"rollout-0": {"state": "failed"}}}), 2.0)
    book.record_adoption(AdoptionReport("rollout-0", 1, "d", True, 0.5, 0.1, 0.1))
    book.evals["before"] = EvalReport("before", 0, (0.0, 1.0), pass_at={1: 0.5})
    book.bus_restarts = 1
    for step in (1.0, 2.0):
        folder.append_metrics({"step": step})
    store.save(book.rows(), {ACCOUNT: book.totals()})
    save_phase(store, RunStatus(RunState.RUNNING), kept.life)
    store.close()
    return book


def test_a_restarted_controller_finds_its_whole_account(folder: RunFolder) -> None:
    """behaviour: B44"""
    before = first_life(folder)
    _, book, kept = restarted(folder)
    assert kept.returned and kept.run == RunStatus(RunState.RUNNING)
    assert book.restarts() == before.restarts() == 2 and book.bus_restarts == 1
    assert book.counter("reward", "rows") == 5 and book.replicas["rollout-0"].retired
    assert book.replicas["reward"].beat == before.replicas["reward"].beat
    assert (book.adoptions, book.evals, book.gap_max) == (before.adoptions, before.evals, before.gap_max)
    assert book.lost(101.0) == [], "silence counts from its own start"
    book.record_beat(beat("reward", "r2", counters={"rows": 4}), 101.0)
    assert book.restarts() == 2 and book.counter("reward", "rows") == 7


def test_a_step_whose_report_is_repeated_to_the_next_controller_is_not_taken_twice(folder: RunFolder) -> None:
    """behaviour: B44"""
    first_life(folder)
    _, book, _ = restarted(folder)
    assert not book.record_step({"step": 2.0}) and book.record_step({"step": 3.0})


def test_another_ray_is_another_life_and_the_log_stays(folder: RunFolder) -> None:
    first_life(folder)
    store, _, _ = restarted(folder)
    store.put_incident(Incident("inc-1", "silent", "ref", "ref", 1.0, "x"))
    store.close()
    store, book, kept = restarted(folder, cluster="c2")
    assert not kept.returned and kept.run == RunStatus()
    assert not book.replicas, "their process numbers belong to others by now"
    assert [step["step"] for step in book.steps] == [1.0, 2.0]
    assert [incident.id for incident in store.incidents()] == ["inc-1"]


def test_an_ended_run_stays_ended_until_it_is_deployed_again(folder: RunFolder) -> None:
    first_life(folder)
    store, _, kept = restarted(folder)
    save_phase(store, RunStatus(RunState.FAILED, "no data"), replace(kept.life, ended_at=1.0))
    store.close()
    assert restarted(folder, deployed_at=1.0)[2].run == RunStatus(RunState.FAILED, "no data")
    assert restarted(folder, deployed_at=2.0)[2].run == RunStatus()


def test_a_store_of_another_schema_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "controller.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '99'")
    with pytest.raises(StoreError, match=r"schema version 99.*move the file away"):
        Store(path)


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "controller.sqlite"
    path.write_text("not a database, and long enough to be read as one" * 50)
    with pytest.raises(StoreError, match="state_path"):
        Store(path)


async def test_the_log_outlives_its_controller_and_what_it_had_begun_is_ended(tmp_path: Path) -> None:
    """behaviour: B44"""
    store = Store(tmp_path / "s")
    log = OperationLog(store)
    running = await log.begin("restart_replica", "reward", "silent")
    await log.start(running.id)
    await log.step(running.id, "kill", "process 7")
    pending = await log.begin("redeploy", "ref", "stuck")
    scale, _ = await log.request(SCALE, "rollout", "asked", {"replicas": 2}, None)
    store.close()
    log = OperationLog(Store(tmp_path / "s"))
    await log.cut_off(frozenset({SCALE}))
    assert log.operation(running.id).state is OperationState.FAILED
    assert "restarted" in log.operation(running.id).error and log.operation(running.id).steps[0].name == "kill"
    assert log.operation(pending.id).state is OperationState.CANCELLED
    assert log.operation(scale.id).state is OperationState.PENDING
    with pytest.raises(UnknownOperation, match="op-none"):
        log.operation("op-none")


async def test_a_scale_request_counts_once_per_key_also_after_a_restart(tmp_path: Path) -> None:
    """behaviour: B44"""
    store = Store(tmp_path / "s")
    scaling = Scaling(OperationLog(store), 60.0)
    assert scaling.wanted is None
    first = await scaling.request(2, "key")
    await scaling.request(3, None)
    store.close()
    log = OperationLog(Store(tmp_path / "s"))
    scaling = Scaling(log, 60.0)
    assert scaling.wanted == 3
    assert (await scaling.request(2, "key")).id == first.id and scaling.wanted == 3, "the same request, not a new one"
    with pytest.raises(KeyConflict, match="key"):
        await scaling.request(4, "key")
    assert log.operation(first.id).state is OperationState.CANCELLED, "it was overtaken"


async def test_a_scale_operation_succeeds_when_so_many_serve_and_none_is_leaving(tmp_path: Path) -> None:
    log = OperationLog(Store(tmp_path / "s"))
    scaling = Scaling(log, 60.0)
    operation = await scaling.request(2, None)
    for training, states, done in (
        (["a"], {"a": "active"}, False),
        (["a", "b"], {"a": "active", "b": "weight_syncing"}, False),
        (["a", "b"], {"a": "active", "b": "ready", "c": "draining"}, False),
        (["a", "b"], {"a": "active", "b": "ready", "c": "stopped"}, True),
    ):
        await scaling.follow({"training": training, "instances": {n: {"state": s} for n, s in states.items()}})
        assert log.operation(operation.id).ended is done, states


async def test_who_waits_for_an_operation_has_it_when_it_ends(tmp_path: Path) -> None:
    log = OperationLog(Store(tmp_path / "s"))
    operation = await log.begin("redeploy", "ref", "stuck")
    assert not (await log.wait(operation.id, 0.0)).ended
    await log.cancel(operation.id, "not needed")
    assert (await log.wait(operation.id, 30.0)).state is OperationState.CANCELLED

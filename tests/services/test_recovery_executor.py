"""The recovery table carried out on real processes, which stand for replicas; Serve and the bus are stood in for."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax.config.run import RunConfig
from relax.config.sections import ControllerArgs
from relax.control.operations import Operation, OperationState
from services.controller import serve_apps
from services.controller.api import Heartbeat
from services.controller.book import RunBook
from services.controller.log import OperationLog
from services.controller.processes import ProcessId, is_alive, kill, kill_here
from services.controller.recovery import Recovery
from services.controller.scaling import Scaling
from services.controller.store import Store

HERE = "node-here"
RECOVERY = {
    "silence_s": 10,
    "start_s": 100,
    "budget": 2,
    "global_budget": 1,
    "backoff_s": 0.01,
    "straggler_window_s": 5,
}


class Bus:
    """It lives in Ray, which these tests do without."""

    def __init__(self) -> None:
        self.renewals = 0

    async def renew(self) -> None:
        self.renewals += 1


class Run:
    """A controller's book, log and recovery, and processes that beat when they are told to."""

    def __init__(self, path: Path) -> None:
        args = ControllerArgs(run=RunConfig(use_ref=False), controller={"recovery": RECOVERY})  # type: ignore[arg-type]
        self.now = 0.0
        self.book, self.store, self.bus = RunBook(args, 0.0), Store(path), Bus()
        self.log = OperationLog(self.store)
        self.failed: list[str] = []
        self.scaling = Scaling(self.log, 60.0)
        self.recovery = self.new_recovery()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.replicas: dict[str, int] = {}

    def new_recovery(self) -> Recovery:
        return Recovery(self.book, self.log, self.store, self.scaling, self.bus, HERE, self._fail)

    async def _fail(self, reason: str) -> None:
        self.failed.append(reason)

    def start(self, name: str) -> None:
        """A process for the next replica of this role or instance."""
        self.processes[name] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.replicas[name] = self.replicas.get(name, 0) + 1

    def beat(self, *names: str, **more: Any) -> None:
        for name in names or tuple(self.processes):
            pid = self.processes[name].pid
            if self.dead(name) or psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                continue
            base: dict[str, Any] = {
                "state": "running",
                "waiting_for": "rows",
                "counters": {},
                "facts": {},
                "time_split": {},
                "node": HERE,
                "started_s": psutil.Process(pid).create_time(),
            }
            role = "instance" if name.startswith("rollout-") else name
            heartbeat = Heartbeat(
                role=role, instance=name, replica_id=f"{name}#{self.replicas[name]}", pid=pid, **{**base, **more}
            )
            self.book.record_beat(heartbeat, self.now)

    async def tick(self, later_s: float = 0.0) -> None:
        self.now += later_s
        await self.recovery.step(self.now)

    async def until(self, condition: Callable[[], bool], beating: bool = True) -> None:
        """Ticks without time going on, until it is so."""
        for _ in range(2000):
            if condition():
                return
            if beating:
                self.beat()
            await self.tick()
            await asyncio.sleep(0.005)
        raise AssertionError(f"not reached; {[op.to_json() for op in self.log.operations()]}")

    def operations(self, kind: str) -> list[Operation]:
        return [operation for operation in self.log.operations() if operation.kind == kind]

    def dead(self, name: str) -> bool:
        return self.processes[name].poll() is not None


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    monkeypatch.setattr(serve_apps, "app_states", lambda deadline_s: {})
    run = Run(tmp_path / "controller.sqlite")
    started: list[subprocess.Popen[bytes]] = []
    start = run.start

    def noted(name: str) -> None:
        start(name)
        started.append(run.processes[name])

    run.start = noted  # type: ignore[method-assign]
    yield run
    for process in started:
        process.kill()
        process.wait()


def test_a_process_is_known_by_its_start_time_too(run: Run) -> None:
    """behaviour: B44"""
    run.start("reward")
    process = run.processes["reward"]
    known = ProcessId(HERE, process.pid, psutil.Process(process.pid).create_time())
    recycled = ProcessId(HERE, process.pid, known.started_s - 60.0)
    assert not kill_here(recycled) and not is_alive(recycled) and is_alive(known), "another process has this number"
    assert kill(known, HERE, 5.0)
    process.wait()
    assert not kill_here(known) and not is_alive(known)


async def test_a_stopped_process_is_killed_and_nobody_else(run: Run) -> None:
    """behaviour: B34 B44"""
    for name in ("reward", "actor", "rollout-0"):
        run.start(name)
    run.beat()
    run.processes["reward"].send_signal(signal.SIGSTOP)
    await run.until(lambda: psutil.Process(run.processes["reward"].pid).status() == psutil.STATUS_STOPPED)
    run.now += 9.0
    run.beat()
    await run.tick()
    assert run.log.operations() == [], "it is within its deadline"
    run.now += 2.0
    run.beat()
    await run.until(lambda: run.dead("reward"))
    [operation] = run.operations("restart_replica")
    assert not operation.ended and not run.dead("actor") and not run.dead("rollout-0")
    run.start("reward")
    await run.until(lambda: run.log.operation(operation.id).ended)
    assert run.log.operation(operation.id).state is OperationState.SUCCEEDED
    [incident] = run.log.incidents()
    assert (incident.fault, incident.instance, incident.ended_s is not None) == ("silent", "reward", True)
    assert incident.operation == operation.id and incident.last_progress_s == 11.0 and incident.node == HERE
    assert len(run.log.operations()) == 1 and run.book.restarts() == 1


async def test_a_dead_process_is_left_to_serve_and_redeployed_when_serve_does_not_bring_it_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B44"""
    redeployed: list[str] = []
    monkeypatch.setattr(serve_apps, "redeploy", lambda app, nonce, deadline_s: redeployed.append(app))
    for name in ("reward", "actor"):
        run.start(name)
    run.beat(app="the-app")
    run.processes["reward"].kill()
    run.processes["reward"].wait()
    await run.until(lambda: any(pending.done_at is not None for pending in run.recovery._pending.values()))
    assert not redeployed
    run.now += 101.0
    run.beat()
    await run.until(lambda: bool(redeployed))
    assert redeployed == ["the-app"] and run.operations("wait")[0].state is OperationState.FAILED
    run.start("reward")
    await run.until(lambda: run.operations("redeploy")[0].ended)
    assert run.operations("redeploy")[0].state is OperationState.SUCCEEDED and not run.failed


async def test_an_error_of_a_role_is_an_incident_with_its_traceback(run: Run) -> None:
    """behaviour: B44"""
    run.start("reward")
    run.beat()
    run.beat(error="Traceback\nValueError: no such reward", state="failed")
    await run.until(lambda: run.dead("reward"), beating=False)
    [incident] = run.log.incidents()
    assert incident.traceback == "Traceback\nValueError: no such reward" and "ValueError" in incident.detail


async def test_spent_budgets_lead_to_a_global_recovery_and_then_to_a_failed_run(run: Run) -> None:
    """behaviour: B44"""
    for name in ("actor", "reward", "dcs"):
        run.start(name)
    run.beat()

    async def error_of_reward() -> None:
        run.beat("reward", error="ValueError: again", state="failed")
        await run.until(lambda: run.dead("reward") or bool(run.failed), beating=False)

    for _ in range(2):
        await error_of_reward()
        assert not run.dead("actor")
        run.start("reward")
        await run.until(lambda: all(operation.ended for operation in run.log.operations()))
    await error_of_reward()
    await run.until(lambda: run.dead("actor") and run.dead("dcs") and run.bus.renewals == 1)
    for name in ("actor", "reward", "dcs"):
        run.start(name)
    await run.until(lambda: run.operations("global_recovery")[0].ended)
    [globally] = run.operations("global_recovery")
    assert globally.state is OperationState.SUCCEEDED and not run.failed
    names = [step.name for step in globally.steps]
    assert names[0] == "restart actor" and names[-3:] == ["restart dcs", "renew the bus", names[-1]]
    await error_of_reward()
    assert "reward" in run.failed[0] and "ValueError: again" in run.failed[0] and "global" in run.failed[0]


async def test_budgets_outlive_the_controller(run: Run) -> None:
    """behaviour: B44"""
    run.start("reward")
    for _ in range(2):
        run.beat(error="ValueError: no", state="failed")
        await run.until(lambda: run.dead("reward"), beating=False)
        run.start("reward")
        await run.until(lambda: all(operation.ended for operation in run.log.operations()))
    run.recovery = run.new_recovery()
    run.beat(error="ValueError: no", state="failed")
    await run.until(lambda: bool(run.operations("global_recovery")), beating=False)


async def test_a_replica_that_worked_after_its_recovery_has_its_budget_back(run: Run) -> None:
    run.start("reward")
    for _ in range(4):
        run.beat(error="ValueError: no", state="failed")
        await run.until(lambda: run.dead("reward"), beating=False)
        run.start("reward")
        await run.until(lambda: all(operation.ended for operation in run.log.operations()))
        run.now += 31.0
        run.beat(counters={"rows": 1.0})
        await run.tick()
    assert len(run.operations("restart_replica")) == 4 and not run.operations("global_recovery")


async def test_recovery_that_is_switched_off_only_tells(run: Run) -> None:
    off = {"recovery": {**RECOVERY, "enabled": False}}
    run.book.args = ControllerArgs(run=RunConfig(use_ref=False), controller=off)  # type: ignore[arg-type]
    run.start("reward")
    run.beat(error="ValueError: no", state="failed")
    for _ in range(3):
        await run.tick()
    [incident] = run.log.incidents()
    assert "switched off" in incident.decision and run.log.operations() == [] and not run.dead("reward")


async def test_a_failed_instance_is_replaced_through_the_manager(run: Run) -> None:
    """behaviour: B31 B44"""
    run.start("rollout")

    def manager(training: list[str], **states: str) -> None:
        told = {name.replace("_", "-"): {"state": state, "reason": "no memory"} for name, state in states.items()}
        run.beat("rollout", facts={"training": training, "instances": told})

    manager(["rollout-0", "rollout-1"], rollout_0="failed", rollout_1="active")
    await run.until(lambda: run.scaling.to_replace() == ("rollout-0",), beating=False)
    [operation] = run.operations("replace_instance")
    manager(["rollout-1", "rollout-2"], rollout_0="failed", rollout_1="active", rollout_2="weight_syncing")
    await run.tick()
    await run.scaling.follow(run.book.manager_facts())
    assert run.scaling.to_replace() == () and not run.log.operation(operation.id).ended
    manager(["rollout-1", "rollout-2"], rollout_0="failed", rollout_1="active", rollout_2="ready")
    await run.until(lambda: run.log.operation(operation.id).ended, beating=False)
    assert "no memory" in run.log.incidents()[0].detail and run.log.incidents()[0].ended_s is not None


async def test_how_an_instance_ends_that_is_taken_away_is_no_fault(run: Run) -> None:
    """behaviour: B34"""
    run.start("rollout")
    run.start("rollout-1")
    told = {"rollout-0": {"state": "active", "reason": ""}, "rollout-1": {"state": "draining", "reason": "1 is wanted"}}
    run.beat("rollout", facts={"training": ["rollout-0"], "instances": told})
    run.beat("rollout-1", error="RuntimeError: no threads any more", state="failed")
    await run.tick()
    assert run.log.incidents() == [] and not run.dead("rollout-1")


async def test_a_straggler_is_an_incident_and_is_replaced_only_by_policy(run: Run) -> None:
    """behaviour: B18"""
    for name in ("rollout-0", "rollout-1"):
        run.start(name)

    async def generate(seconds: int) -> None:
        for _ in range(seconds):
            run.now += 1.0
            for name, speed in (("rollout-0", 10.0), ("rollout-1", 2.0)):
                facts = {"request_s": 4.0 * run.now}
                run.beat(name, state="active", counters={"tokens": speed * run.now}, facts=facts)
            await run.tick()

    await generate(8)
    [incident] = run.log.incidents()
    assert (incident.fault, incident.instance) == ("straggler", "rollout-1") and "only reported" in incident.decision
    assert run.log.operations() == []
    by_policy = {"recovery": {**RECOVERY, "replace_stragglers": True}}
    run.book.args = ControllerArgs(run=RunConfig(use_ref=False), controller=by_policy)  # type: ignore[arg-type]
    await run.log.end_incidents("rollout-1")
    await generate(1)
    await run.until(lambda: run.scaling.to_replace() == ("rollout-1",), beating=False)


async def test_a_lost_bus_is_renewed_within_its_budget(run: Run) -> None:
    """behaviour: B44"""
    await run.recovery.bus_lost("EngineHost is dead")
    assert run.bus.renewals == 1 and run.book.bus_restarts == 1
    [incident] = run.log.incidents()
    assert incident.fault == "bus_lost" and incident.ended_s is not None
    assert run.operations("renew_bus")[0].state is OperationState.SUCCEEDED

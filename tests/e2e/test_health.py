"""The health controller on real runs: what dies or stops is replaced alone, and nothing is lost or doubled."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from e2e_support import EASY, Finished, Runner

from services.rollout.ledger import Ledger, TerminalState

GROUPS = 8
LONG = ["run.steps=100000", "actor.checkpoint_every=0"]
"""These runs are ended by their test."""
SILENCE_S = 12
Status = dict[str, Any]


class Api:
    """The run's control API, and its processes, as a status of it tells."""

    def __init__(self, status: Status) -> None:
        self.status = status
        self.base = json.loads((Path(status["run_dir"]) / "run.json").read_text())["url"] + "/api/v1"

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.base}/{path}", timeout=20.0, trust_env=False).raise_for_status().json()

    def scale(self, replicas: Any, key: str | None = None) -> httpx.Response:
        headers = {"Idempotency-Key": key} if key else {}
        body = {"replicas": replicas}
        return httpx.post(f"{self.base}/rollout/scale", json=body, headers=headers, timeout=20.0, trust_env=False)

    def stop(self) -> None:
        httpx.post(f"{self.base}/stop", timeout=60.0, trust_env=False).raise_for_status()

    def view(self, instance: str) -> Status | None:
        return next((view for view in self.status["roles"] if view["instance"] == instance), None)

    def controller_pid(self) -> int:
        actor = self.view("actor")
        assert actor is not None
        raylet = psutil.Process(actor["pid"]).parent()
        assert raylet is not None
        [pid] = [
            child.pid
            for child in raylet.children()
            if "".join(child.cmdline()[:1]).startswith("ray::ServeReplica:controller")
        ]
        return pid

    def serving(self) -> list[str]:
        return sorted(view["instance"] for view in self.status["roles"] if view["state"] == "active")


def script(steps: Iterator[None], api: list[Api]) -> Callable[[Status], None]:
    """Runs a generator along with the run: it goes on with each status, which it finds in `api[0]`."""

    def during(status: Status) -> None:
        if status["state"] in ("running", "finishing"):
            api[:] = [Api(status)]
            next(steps, None)

    return during


def trained(done: Finished) -> Counter[int]:
    """Step -> its groups. No group is in two steps, and metrics.jsonl has each step once, in order."""
    with Ledger(done.folder / "ledger.sqlite", read_only=True) as ledger:
        terminals = ledger.terminals(TerminalState.TRAINED)
    assert len({terminal.group_id for terminal in terminals}) == len(terminals)
    steps = [int(line["step"]) for line in done.lines("metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    return Counter(terminal.step for terminal in terminals if terminal.step is not None)


def restarts(done: Finished) -> dict[str, int]:
    return {view["instance"]: view["restarts"] for view in done.seen[-1]["roles"] if view["restarts"]}


def test_training_goes_on_without_its_controller_which_takes_up_where_it_was(run: Runner) -> None:
    """behaviour: B12 B44"""
    steps, api, killed = 60, [], []  # type: ignore[var-annotated]

    def acts() -> Iterator[None]:
        while api[0].status["step"] < 5:
            yield
        killed.append(api[0].controller_pid())
        before = {view["instance"]: view["pid"] for view in api[0].status["roles"]}
        os.kill(killed[0], signal.SIGKILL)
        yield
        assert {view["instance"]: view["pid"] for view in api[0].status["roles"]} == before
        assert api[0].controller_pid() != killed[0]

    done = run(*EASY, f"run.steps={steps}", during=script(acts(), api))
    assert done.outcome.state == "finished", done.outcome.reason
    assert killed, "the run was over too soon"
    assert trained(done) == {step: GROUPS for step in range(1, steps + 1)}
    assert restarts(done) == {} and done.summary["restarts_unasked"] == 0
    assert done.summary["bus_restarts"] == 0, "it found its own bus"
    assert done.summary["trained"] == steps * GROUPS * 16 and done.summary["steps"] == steps


@pytest.mark.parametrize(
    "stopped",
    ["reward", pytest.param("ref", marks=pytest.mark.slow), pytest.param("rollout-0", marks=pytest.mark.slow)],
)
def test_a_stopped_process_is_replaced_and_nobody_else(run: Runner, stopped: str) -> None:
    """behaviour: B31 B34 B44"""
    api: list[Api] = []
    found: dict[str, Any] = {}

    def acts() -> Iterator[None]:
        while api[0].status["step"] < 5:
            yield
        view = api[0].view(stopped)
        assert view is not None
        os.kill(view["pid"], signal.SIGSTOP)
        version = view["version"]
        while (view := api[0].view(stopped)) is None or view["restarts"] == 0 or view["state"] == "starting":
            yield
        back_at = api[0].status["step"]
        while api[0].status["step"] < back_at + 5 or not any(op["ended_s"] for op in api[0].get("operations")):
            view = api[0].view(stopped)
            if stopped == "rollout-0" and view is not None and view["counters"].get("samples"):
                assert view["version"] >= version and view["counters"]["adoptions"] >= 1
            yield
        found.update(incidents=api[0].get("incidents"), operations=api[0].get("operations"))
        api[0].stop()

    quick = f"controller.recovery.silence_s={SILENCE_S}"
    done = run(*EASY, *LONG, quick, during=script(acts(), api))
    assert done.outcome.state == "stopped", done.outcome.reason
    assert restarts(done) == {stopped: 1}
    [incident] = found["incidents"]
    assert incident["instance"] == stopped and incident["fault"] == "silent" and incident["node"]
    [operation] = found["operations"]
    assert (operation["kind"], operation["state"]) == ("restart_replica", "succeeded"), operation
    assert "was killed" in operation["steps"][0]["detail"]
    by_step = trained(done)
    assert all(by_step[step] == GROUPS for step in range(1, max(by_step)))


def test_instances_are_scaled_while_training_goes_on_also_over_a_loss_of_the_controller(run: Runner) -> None:
    """behaviour: B31 B44"""
    api: list[Api] = []

    def reached(operation: str) -> bool:
        ended = api[0].get(f"operations/{operation}")
        assert ended["state"] in ("pending", "running", "succeeded"), ended
        return bool(ended["state"] == "succeeded")

    def acts() -> Iterator[None]:
        while api[0].status["step"] < 3:
            yield
        for nonsense in (0, -1, "two", 1.5, None, 100_000):
            refused = api[0].scale(nonsense)
            assert refused.status_code == 422, nonsense
            assert refused.headers["content-type"] == "application/problem+json" and "replicas" in refused.text
        assert httpx.get(f"{api[0].base}/operations/op-none", timeout=20.0, trust_env=False).status_code == 404
        asked = api[0].scale(2, "up")
        assert asked.status_code == 202, asked.text
        up = asked.json()["id"]
        os.kill(api[0].controller_pid(), signal.SIGKILL)
        yield
        again = api[0].scale(2, "up").json()
        assert again["id"] == up and api[0].scale(3, "up").status_code == 422
        while not reached(up):
            yield
        while len(api[0].serving()) < 2:
            yield
        [new] = set(api[0].serving()) - {"rollout-0"}
        view = api[0].view(new)
        assert view is not None and view["counters"]["adoptions"] >= 1
        step = api[0].status["step"]
        down = api[0].scale(1).json()["id"]
        while not reached(down) or api[0].status["step"] < step + 5:
            yield
        assert api[0].serving() == ["rollout-0"], "the newest one went"
        api[0].stop()

    done = run(*EASY, *LONG, "rollout.instances=1", during=script(acts(), api))
    assert done.outcome.state == "stopped", done.outcome.reason
    assert restarts(done) == {} and done.summary["restarts_unasked"] == 0
    by_step = trained(done)
    assert all(by_step[step] == GROUPS for step in range(1, max(by_step)))
    assert done.summary["dropped_by_reason"] == {}, "what the drained instance held was finished by another"


@contextlib.contextmanager
def slowed_down(pid: int) -> Iterator[None]:
    """The process runs for a tenth of the time."""
    process, ended = psutil.Process(pid), threading.Event()

    def slow() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not ended.wait(0.05):
                process.suspend()
                ended.wait(0.45)
                process.resume()

    thread = threading.Thread(target=slow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


@pytest.mark.slow
def test_a_straggler_is_told_and_replaced_by_policy(run: Runner) -> None:
    """behaviour: B18"""
    api: list[Api] = []
    found: list[dict[str, Any]] = []

    def acts() -> Iterator[None]:
        while api[0].status["step"] < 3 or len(api[0].serving()) < 2:
            yield
        view = api[0].view("rollout-1")
        assert view is not None
        with slowed_down(view["pid"]):
            while not any(item["fault"] == "straggler" for item in api[0].get("incidents")):
                yield
        while api[0].serving() != ["rollout-0", "rollout-2"]:
            yield
        found.extend(api[0].get("incidents"))
        api[0].stop()

    policy = ["controller.recovery.straggler_window_s=10", "controller.recovery.replace_stragglers=true"]
    done = run(*EASY, *LONG, *policy, during=script(acts(), api))
    assert done.outcome.state == "stopped", done.outcome.reason
    assert {(item["fault"], item["instance"]) for item in found} == {("straggler", "rollout-1")}
    assert "of its peers' tokens/s" in found[0]["detail"]
    by_step = trained(done)
    assert all(by_step[step] == GROUPS for step in range(1, max(by_step)))

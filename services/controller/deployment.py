"""The health controller: owns the bus, keeps the account of the run, serves `/api/v1`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError

from bus.client import BusClient
from bus.errors import BusError, BusTimeout, BusUnavailable
from bus.lifecycle import create_bus, destroy_bus
from bus.records import BusAddress, BusStats
from relax.config.sections import ROLES, ControllerArgs
from relax.control.runstate import RunState, RunStatus
from relax.control.stopping import all_stopped, others_may_stop
from relax.control.watchdog import find_stall
from relax.telemetry.metrics import validate
from relax.telemetry.run_folder import RunFolder, RunFolderError
from relax.telemetry.sinks import MetricSinks, RunFolderSink
from relax.telemetry.trackers import build_trackers
from services import names
from services.controller.api import (
    Accepted,
    AdoptionReport,
    Directive,
    EvalReport,
    Health,
    Heartbeat,
    RunInfo,
    Status,
)
from services.controller.book import RunBook, bus_snapshot
from services.controller.closing import close_run, stats_json
from services.controller.earlier import eval_line, take_up
from services.controller.exporter import LiveExport, RayMetrics, metrics_endpoints
from services.runtime import ServiceUnavailable, asked_to_end, call, run_folder_path, serve_place

logger = logging.getLogger("ray.serve")
api = FastAPI(title="Relax control API", version="1")
TICK_S = 0.5
BUS_PING_S = 1.0
BUS_START_S = 60.0
ENDPOINTS_EVERY_S = 15.0
"""Nodes that join or leave are in the list that Prometheus reads after at most this time."""
ENDPOINTS_DEADLINE_S = 10.0
TRACKERS_DEADLINE_S = 10.0
"""For all trackers to write what they have, at the end of the run."""
TAKE_DOWN_DEADLINE_S = 25.0
"""For instances and weights to go: shorter than `relax run` and `relax stop` wait."""
STATE_FILE = "state.json"


def load_or_create_run_id(folder: Path) -> str:
    """One id for the life of a run folder, kept in it."""
    path = folder / STATE_FILE
    if path.exists():
        return str(json.loads(path.read_text())["run_id"])
    run_id = uuid.uuid4().hex[:12]
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"run_id": run_id}) + "\n")
    partial.rename(path)
    return run_id


@serve.deployment(
    max_ongoing_requests=1000,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=5,
    graceful_shutdown_wait_loop_s=0.2,
)
@serve.ingress(api)
class Controller:
    async def __init__(self, args: ControllerArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        self.args = args
        self.folder = RunFolder(run_folder_path(args.run))
        self.run_id = load_or_create_run_id(self.folder.path)
        place = await asyncio.to_thread(serve_place)
        await asyncio.to_thread(self.folder.write_place, url=place.url, logs=place.logs)
        logger.info("run %s in %s, process %d", self.run_id, self.folder.path, os.getpid())
        self.config: dict[str, Any] = {
            "run": args.run.model_dump(mode="json"),
            "controller": args.controller.model_dump(mode="json"),
        }
        self.book = RunBook(args, time.monotonic())
        ray_metrics = RayMetrics(args.run.name)
        self.live = LiveExport(ray_metrics)
        self.sinks = MetricSinks(
            [RunFolderSink(self.folder), ray_metrics],
            build_trackers(args.controller, args.run.name, self.run_id, self.folder.path),
        )
        self.run = RunStatus()
        self.wall_started = time.monotonic()
        self.stalled: list[str] = []
        self.summary: dict[str, Any] | None = None
        self.violations: list[str] = []
        self._bus_given_up: str | None = None
        self.bus_stats: BusStats | None = None
        self.bus_stats_at = -math.inf
        self._error: str | None = None
        self._closing = asyncio.Lock()
        self._taking_down = asyncio.Lock()
        self._taken_down = False
        self._end_asked_at: float | None = None
        self._beat_heard = asyncio.Event()
        await asyncio.to_thread(take_up, self.book, self.folder)
        self.bus_address = await self._create_bus()
        self.bus = await BusClient.connect(
            self.bus_address,
            owner="controller",
            role=names.CONTROLLER,
            config=args.run.bus,
            deadline_s=60.0,
            rows=False,
        )
        loop = asyncio.get_running_loop()
        works = (self._supervise, self._watch_bus, self._keep_endpoints)
        self._tasks = [loop.create_task(self._guarded(work)) for work in works]

    async def _create_bus(self) -> BusAddress:
        run = self.args.run
        return await asyncio.to_thread(
            create_bus,
            self.run_id,
            names.namespace(run.name),
            run.bus,
            run.max_tokens,
            top_k=run.teacher_top_k,
            complete_fields=("reward",) if run.generates else ("tokens",),
        )

    async def check_health(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)

    # ------------------------------------------------------------------ what roles call

    async def join(self, role: str, section: dict[str, Any]) -> RunInfo:
        """A role comes up: its part of the resolved configuration goes into the run folder."""
        if role in ROLES and self.config.get(role) != section:
            self.config[role] = section
            await asyncio.to_thread(self.folder.write_config, dict(self.config))
        return RunInfo(self.run_id, self.bus_address, self.args.controller.heartbeat_s, tuple(self.book.evals))

    async def heartbeat(self, beat: Heartbeat) -> Directive:
        now = time.monotonic()
        self.book.record_beat(beat, now)
        self._beat_heard.set()
        return Directive(stop=self._tells_to_stop(beat, now), run_state=self.run.state.value)

    def _tells_to_stop(self, beat: Heartbeat, now: float) -> bool:
        """The trainer hears of the end first: the others serve it until it has saved, at most for the deadline."""
        if self._end_asked_at is None:
            return False
        late = now - self._end_asked_at > self.args.controller.stop_deadline_s
        return beat.role == names.ACTOR or late or others_may_stop(self.book.hearings(now))

    async def report_adoption(self, report: AdoptionReport) -> None:
        self.book.record_adoption(report)

    async def report_step(self, record: dict[str, float]) -> None:
        """One record of the training loop per step; a repeated one is ignored."""
        try:
            await self._stats()
        except BusError as error:  # it is being replaced: the last snapshot has to do
            logger.warning("no statistics of the bus for step %d: %s", record["step"], error)
        joined = self.book.complete_record(record, stats_json(self.bus_stats) if self.bus_stats else {})
        validate(joined)
        if self.book.record_step(joined):
            await asyncio.to_thread(self.sinks.write, joined)

    async def report_samples(self, lines: bytes) -> None:
        """Of `sample_lines`."""
        await asyncio.to_thread(self.folder.append_samples, lines)

    async def report_eval(self, report: EvalReport) -> None:
        self.book.evals[report.when] = report
        await asyncio.to_thread(self.folder.append_eval, eval_line(report))

    # ------------------------------------------------------------------ HTTP

    @api.get("/api/v1/status", response_model=Status)
    async def status(self) -> Status:
        """The whole state of the run."""
        now = time.monotonic()
        last = self.book.steps[-1] if self.book.steps else {}
        return Status(
            run=self.args.run.name,
            state=self.run.state.value,
            reason=self.run.reason,
            step=int(last.get("step", 0)),
            steps=self.args.run.steps,
            wall_s=now - self.wall_started,
            run_dir=str(self.folder.path),
            metrics=last,
            roles=self.book.views(now),
            bus={} if self.bus_stats is None else stats_json(self.bus_stats),
            stalled=self.stalled,
            restarts_unasked=self.book.restarts(),
            summary=self.summary,
            violations=self.violations,
            tracker_errors=self.sinks.troubles(),
        )

    @api.get("/api/v1/health", response_model=Health)
    async def health(self) -> Health:
        """Whether every role is there and none has failed."""
        now = time.monotonic()
        problems = [f"{name}: silent" for name in self.book.lost(now)]
        problems += [f"{view.instance}: {view.error}" for view in self.book.views(now) if view.error]
        problems += [f"{role}: not up yet" for role in self.book.missing()] if not self.run.ended else []
        return Health(healthy=not problems, problems=problems)

    @api.post("/api/v1/stop", status_code=202, response_model=Accepted)
    async def stop(self) -> Accepted:
        """End the run: roles stop, instances and bus are taken down, shared memory is freed."""
        await self._let_stop()
        if not self.run.ended:
            await self._end(RunState.STOPPED)
        await self._take_down()
        return Accepted(state=self.run.state.value)

    async def renew_bus(self, epoch: str, reason: str) -> None:
        """The manager cannot go on with this bus: an empty one takes its place. Not when it has been replaced."""
        if epoch == self.bus.caller.epoch:
            self._bus_given_up = reason

    # ------------------------------------------------------------------ supervision

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """A fault of one of the controller's own loops makes it unhealthy."""
        try:
            await work()
        except asyncio.CancelledError as error:
            if not asked_to_end():
                self._error = repr(error)
            raise
        except Exception as error:  # the supervisor border of this process
            logger.exception("controller failed")
            self._error = repr(error)

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.run.ended:
                self._export_live(time.monotonic())  # until the services are taken down
            else:
                await self._tick(time.monotonic())

    async def _tick(self, now: float) -> None:
        try:
            if now - self.bus_stats_at >= TICK_S:
                await self._stats()
        except BusError as error:
            logger.warning("no statistics of the bus: %s", error)  # `_watch_bus` acts on it
        if self.bus_stats is not None and not self.bus_stats.account.balanced:
            await self._end(RunState.FAILED, f"samples do not add up in the bus: {self.bus_stats.account}")
            return
        fatal = self.book.fatal()
        if fatal is not None:
            await self._end(RunState.FAILED, fatal)
        elif self.book.all_done():
            if self.run.state is RunState.STARTING:  # a run may end before every role was seen running
                self.run = self.run.move(RunState.RUNNING)
            self.run = self.run.move(RunState.FINISHING)
            await self._end(RunState.FINISHED)
        elif self.run.state is RunState.STARTING:
            missing = self.book.missing()
            if not missing:
                self.run = self.run.move(RunState.RUNNING)
            elif now - self.book.started_at > self.args.controller.start_deadline_s:
                await self._end(
                    RunState.FAILED, f"{', '.join(missing)} not up within {self.args.controller.start_deadline_s:g} s"
                )
        if not self.run.ended:
            self._watch(now)
            self._export_live(now)
            if self.stalled and self.args.controller.stall_stops_run:
                await self._end(RunState.FAILED, "; ".join(self.stalled))

    async def _watch_bus(self) -> None:
        """A bus with a dead process, or that is silent for too long, is made anew; its users find it by name."""
        heard_at = time.monotonic()
        while not self.run.ended:
            try:
                await self.bus.ping()
                if self._bus_given_up is not None:
                    raise BusUnavailable(self._bus_given_up)
            except (BusUnavailable, BusTimeout) as error:
                if isinstance(error, BusTimeout) and time.monotonic() - heard_at < self.args.controller.bus_silence_s:
                    continue
                if not self.run.ended:  # else it was taken down
                    await self._replace_bus(str(error))
            heard_at = time.monotonic()
            await asyncio.sleep(BUS_PING_S)

    async def _replace_bus(self, reason: str) -> None:
        self.book.bus_restarts += 1
        logger.error("the bus is lost, number %d: %s", self.book.bus_restarts, reason)
        if self.book.bus_restarts > self.args.controller.max_bus_restarts:
            await self._end(RunState.FAILED, f"the bus was lost {self.book.bus_restarts} times; the last: {reason}")
            return
        lost = self.bus.caller
        await asyncio.to_thread(destroy_bus, self.bus_address)
        self._bus_given_up = None
        await self._create_bus()
        await self.bus.reattach(lost, deadline_s=BUS_START_S)

    def _watch(self, now: float) -> None:
        """Say who waits for whom when no counter has moved for `stall_s` (B46)."""
        if self.bus_stats is None or self.run.state is not RunState.RUNNING:
            return
        stall = find_stall(self.book.snapshots(), bus_snapshot(self.bus_stats, now), now, self.args.controller.stall_s)
        if stall is not None and not self.stalled:
            logger.warning("%s", stall.text())
        self.stalled = [] if stall is None else [stall.text()]

    def _export_live(self, now: float) -> None:
        engine = self.config.get("rollout", {}).get("engine", {})
        self.live.export(
            self.book,
            self.bus_stats,
            self.run.state,
            self.stalled,
            {tracker.name: tracker.errors for tracker in self.sinks.trackers},
            engine.get("dtype", "float32"),
            now,
        )

    async def _keep_endpoints(self) -> None:
        """The list of what Prometheus scrapes follows the nodes of the cluster."""
        known: list[str] = []
        while not self.run.ended:
            try:
                found = await asyncio.wait_for(asyncio.to_thread(metrics_endpoints), ENDPOINTS_DEADLINE_S)
                if found != known:
                    await asyncio.to_thread(self.folder.write_targets, found, self.args.run.name)
                    known = found
            except (TimeoutError, RayError, RunFolderError) as error:
                logger.warning("metrics endpoints not listed: %s", error or type(error).__name__)
            await asyncio.sleep(ENDPOINTS_EVERY_S)

    async def _stats(self) -> None:
        self.bus_stats = await self.bus.stats()
        self.bus_stats_at = time.monotonic()

    async def _end(self, state: RunState, reason: str = "") -> None:
        """Write the summary and the report, then tell everybody through their heartbeats."""
        async with self._closing:
            if self.run.ended:
                return
            await asyncio.to_thread(self.sinks.close, TRACKERS_DEADLINE_S)
            closed = await asyncio.to_thread(
                close_run,
                self.book,
                self.folder,
                self.bus_stats,
                time.monotonic() - self.wall_started,
                state,
                reason,
                self.sinks.troubles(),
            )
            self.summary, self.violations = closed.summary, closed.violations
            self.run = self.run.move(state, reason)
            self._ask_to_stop()
            self._export_live(time.monotonic())
            if state is RunState.FAILED:
                logger.error("run failed: %s", reason)

    def _ask_to_stop(self) -> None:
        if self._end_asked_at is None:
            self._end_asked_at = time.monotonic()

    async def _let_stop(self) -> None:
        """Until every role has heard of the end, and the trainer has saved; at most `controller.stop_deadline_s`."""
        self._ask_to_stop()
        deadline = time.monotonic() + self.args.controller.stop_deadline_s
        while not all_stopped(self.book.hearings(now := time.monotonic())):
            if now >= deadline:
                logger.warning("not all roles stopped within %g s", self.args.controller.stop_deadline_s)
                return
            self._beat_heard.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._beat_heard.wait(), deadline - now)

    async def _take_down(self) -> None:
        """Once, however many ask for it."""
        async with self._taking_down:
            if not self._taken_down:
                await self._remove_all()
                self._taken_down = True

    async def _remove_all(self) -> None:
        """Side by side: a role that never came up must not keep the others from freeing what they hold."""

        async def tell(app: str, method: str) -> None:
            try:
                await call(app, method, deadline_s=TAKE_DOWN_DEADLINE_S)
            except (ServiceUnavailable, serve.exceptions.RayServeException) as error:
                logger.warning("taking down: %s", error)

        await asyncio.gather(tell(names.ROLLOUT, "remove_instances"), tell(names.DCS, "remove_weights"))
        await self.bus.close()
        await asyncio.to_thread(destroy_bus, self.bus_address)

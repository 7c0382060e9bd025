"""The health controller: owns the bus, keeps the account of the run, recovers what fails, serves `/api/v1`.

What it knows is in its store, so a controller that was killed takes up where it was; training goes on meanwhile.
Annotations are evaluated here: FastAPI reads them again where Serve has unpickled this class.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any

import ray
from fastapi import FastAPI, Header, Query
from ray import serve

from relax.config.sections import ROLES, ControllerArgs
from relax.control.runstate import RunState
from relax.control.stopping import all_stopped, others_may_stop
from relax.control.watchdog import find_stall
from relax.telemetry.metrics import validate
from relax.telemetry.run_folder import RunFolder
from relax.telemetry.sinks import MetricSinks, RunFolderSink
from relax.telemetry.trackers import build_trackers
from services import names
from services.controller import serve_apps
from services.controller.api import (
    Accepted,
    AdoptionReport,
    Directive,
    EvalReport,
    Health,
    Heartbeat,
    IncidentView,
    OperationView,
    Problem,
    Quiescence,
    RunInfo,
    ScaleRequest,
    Status,
)
from services.controller.book import RunBook, bus_snapshot
from services.controller.bus_owner import BusOwner
from services.controller.closing import close_run, in_flight, stats_json
from services.controller.earlier import eval_line
from services.controller.exporter import LiveExport, RayMetrics, keep_endpoints
from services.controller.keeping import ACCOUNT, CONFIG, load_or_create_run_id, open_store, save_phase, take_up
from services.controller.log import OperationLog
from services.controller.problems import NotNow, add_problems
from services.controller.recovery import Recovery
from services.controller.scaling import SCALE, Scaling
from services.runtime import ServiceUnavailable, asked_to_end, call, run_folder_path, serve_place

logger = logging.getLogger("ray.serve")
api = FastAPI(title="Relax control API", version="1")
add_problems(api)
TICK_S = 0.5
SAVE_S = 1.0
"""What was heard since then is heard again after a restart."""
TRACKERS_DEADLINE_S = 10.0
"""For all trackers to write what they have, at the end of the run."""
TAKE_DOWN_DEADLINE_S = 25.0
"""For instances and weights to go: shorter than `relax run` and `relax stop` wait."""
MAX_WAIT_S = 60.0


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
        self.stalled: list[str] = []
        self.summary: dict[str, Any] | None = None
        self.violations: list[str] = []
        self._error: str | None = None
        self._closing, self._step_lock = asyncio.Lock(), asyncio.Lock()
        self._taking_down = asyncio.Lock()
        self._taken_down = False
        self._end_asked_at: float | None = None
        self._beat_heard = asyncio.Event()
        self._saved_at = self._ticked_at = time.monotonic()
        self.book = RunBook(args, time.monotonic())
        await self._take_up()
        ray_metrics = RayMetrics(args.run.name)
        self.live = LiveExport(ray_metrics)
        self.sinks = MetricSinks(
            [RunFolderSink(self.folder), ray_metrics],
            build_trackers(args.controller, args.run.name, self.run_id, self.folder.path),
        )
        await self._start_bus()
        loop = asyncio.get_running_loop()
        works = (self._supervise, self._watch_bus, self._keep_endpoints)
        self._tasks = [loop.create_task(self._guarded(work)) for work in works]

    async def _take_up(self) -> None:
        """The state that an earlier controller left, and those who work on it."""
        cluster = serve_apps.cluster_id()
        self.store = await asyncio.to_thread(open_store, self.args, self.folder)
        deployed_at = await asyncio.to_thread(serve_apps.deployed_at, names.CONTROLLER)
        kept = await asyncio.to_thread(
            take_up, self.store, self.book, self.folder, cluster, deployed_at, time.monotonic()
        )
        self.run, self.life, self._returned = kept.run, kept.life, kept.returned
        self.config: dict[str, Any] = {
            **kept.config,
            "run": self.args.run.model_dump(mode="json"),
            "controller": self.args.controller.model_dump(mode="json"),
        }
        self.log = OperationLog(self.store)
        self.scaling = Scaling(self.log, self.args.controller.start_deadline_s)
        self.bus = BusOwner(self.args, self.run_id)
        node = ray.get_runtime_context().get_node_id()
        self.recovery = Recovery(self.book, self.log, self.store, self.scaling, self.bus, node, self._fail)
        await self.log.cut_off(frozenset({SCALE} if kept.returned else ()))
        if kept.returned:
            logger.warning("an earlier controller was here: run %s, step %d", self.run.state, len(self.book.steps))
        if self.run.ended:
            self._ask_to_stop()
            self.summary = await asyncio.to_thread(self.folder.read_summary)
            self.violations = list(self.summary.get("violations", []))

    async def _start_bus(self) -> None:
        if self.run.ended:
            await self.bus.attach()
        elif not await self.bus.start() and self._returned:
            self.book.bus_restarts += 1
            logger.error("the bus was lost together with the controller; it is made anew")

    async def check_health(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)

    # ------------------------------------------------------------------ what roles call

    async def join(self, role: str, section: dict[str, Any]) -> RunInfo:
        """A role comes up: its part of the resolved configuration goes into the run folder."""
        if role in ROLES and self.config.get(role) != section:
            self.config[role] = section
            await asyncio.to_thread(self.folder.write_config, dict(self.config))
            await asyncio.to_thread(self.store.set, **{CONFIG: self.config})
        return RunInfo(self.run_id, self.bus.address, self.args.controller.heartbeat_s, tuple(self.book.evals))

    async def heartbeat(self, beat: Heartbeat) -> Directive:
        now = time.monotonic()
        self.book.record_beat(beat, now)
        self._beat_heard.set()
        told = Directive(stop=self._tells_to_stop(beat, now), run_state=self.run.state.value)
        if beat.role == names.ROLLOUT and self.args.run.generates:
            configured = self.config.get(names.ROLLOUT, {}).get("instances")
            told = replace(told, instances=self.scaling.wanted or configured, replace=self.scaling.to_replace())
        return told

    def _tells_to_stop(self, beat: Heartbeat, now: float) -> bool:
        """The trainer hears of the end first: the others serve it until it has saved, at most for the deadline."""
        if self._end_asked_at is None:
            return False
        late = now - self._end_asked_at > self.args.controller.stop_deadline_s
        return beat.role == names.ACTOR or late or others_may_stop(self.book.hearings(now))

    async def report_adoption(self, report: AdoptionReport) -> None:
        self.book.record_adoption(report)

    async def report_step(self, record: dict[str, float]) -> None:
        """One record of the training loop per step; a repeated one is ignored. metrics.jsonl is written first: what
        is there was taken, whatever became of the answer."""
        async with self._step_lock:
            if self.book.has_step(record):
                return
            await self.bus.try_refresh()  # where it is being replaced the last snapshot has to do
            joined = self.book.complete_record(record, stats_json(self.bus.stats) if self.bus.stats else {})
            validate(joined)
            await asyncio.to_thread(self.sinks.write, joined)
            self.book.record_step(joined)

    async def report_samples(self, lines: bytes, sender: str, number: int) -> None:
        """Of `sample_lines`. `number` counts the reports of a sender: a repeated one is ignored."""
        if self.book.sample_reports.get(sender, 0) < number:
            self.book.sample_reports[sender] = number
            await asyncio.to_thread(self.folder.append_samples, lines)

    async def report_eval(self, report: EvalReport) -> None:
        if self.book.evals.get(report.when) != report:
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
            wall_s=time.time() - self.life.began_s,
            run_dir=str(self.folder.path),
            metrics=last,
            roles=self.book.views(now),
            bus={} if self.bus.stats is None else stats_json(self.bus.stats),
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

    @api.get("/api/v1/quiescence", response_model=Quiescence)
    async def quiescence(self) -> Quiescence:
        """What is in flight."""
        await self.bus.try_refresh()
        found = in_flight(self.book, self.bus.stats, len(self.log.open_operations()), time.monotonic())
        return Quiescence(quiescent=not found, in_flight=found)

    @api.get("/api/v1/operations", response_model=list[OperationView])
    async def operations(self) -> list[dict[str, Any]]:
        """All that were begun, the oldest first."""
        return [operation.to_json() for operation in self.log.operations()]

    @api.get("/api/v1/operations/{operation_id}", response_model=OperationView, responses={404: {"model": Problem}})
    async def operation(
        self, operation_id: str, wait_s: Annotated[float, Query(ge=0.0, le=MAX_WAIT_S)] = 0.0
    ) -> dict[str, Any]:
        """One operation; with `wait_s` when it has ended, or after that time."""
        return (await self.log.wait(operation_id, wait_s)).to_json()

    @api.get("/api/v1/incidents", response_model=list[IncidentView])
    async def incidents(self) -> list[dict[str, Any]]:
        """All that went wrong, the oldest first."""
        return [incident.to_json() for incident in self.log.incidents()]

    @api.post(
        "/api/v1/rollout/scale",
        status_code=202,
        response_model=OperationView,
        responses={409: {"model": Problem}, 422: {"model": Problem}},
    )
    async def scale(
        self, body: ScaleRequest, idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None
    ) -> dict[str, Any]:
        """Set the number of training instances while training goes on; durable, and the same key asks once."""
        if self.run.ended or not self.args.run.generates:
            why = f"it has {self.run.state}" if self.run.ended else "it trains on recorded responses"
            raise NotNow(f"run '{self.args.run.name}' cannot be scaled: {why}")
        return (await self.scaling.request(body.replicas, idempotency_key)).to_json()

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
        self.bus.give_up(epoch, reason)

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

    async def _watch_bus(self) -> None:
        if not self.run.ended:
            await self.bus.watch(lambda: self.run.ended, self.recovery.bus_lost)

    async def _keep_endpoints(self) -> None:
        await keep_endpoints(self.folder, self.args.run.name, lambda: self.run.ended)

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - self._ticked_at > self.args.controller.recovery.silence_s / 2:
                self.book.forgive(now - self._ticked_at)  # we were held up, and heard nobody
            self._ticked_at = now
            if self.run.ended:
                self._export_live(now)  # until the services are taken down
            else:
                await self._tick(now)
            if now - self._saved_at >= SAVE_S:
                self._saved_at = now
                rows, totals = self.book.rows(), self.book.totals()
                await asyncio.to_thread(self.store.save, rows, {ACCOUNT: totals})

    async def _tick(self, now: float) -> None:
        if now - self.bus.stats_at >= TICK_S:
            await self.bus.try_refresh()  # `_watch_bus` acts on a loss
        if self.bus.stats is not None and not self.bus.stats.account.balanced:
            await self._fail(f"samples do not add up in the bus: {self.bus.stats.account}")
            return
        fatal = self.book.fatal()
        if fatal is not None:
            await self._fail(fatal)
        elif self.book.all_done():
            await self._finish(now)
        elif self.run.state is RunState.STARTING:
            await self._check_start(now)
        if self.run.ended:
            return
        await self.scaling.follow(self.book.manager_facts())
        if self.run.state is RunState.RUNNING:
            await self.recovery.step(now)
        self._watch(now)
        self._export_live(now)
        if self.stalled and self.args.controller.stall_stops_run:
            await self._fail("; ".join(self.stalled))

    async def _finish(self, now: float) -> None:
        """Every role says that it is done; the run ends once nothing is in flight."""
        if self.run.state is RunState.STARTING:  # a run may end before every role was seen running
            await self._move(RunState.RUNNING)
        if self.run.state is RunState.RUNNING:
            await self._move(RunState.FINISHING)
        if not in_flight(self.book, self.bus.stats, 0, now):
            await self._end(RunState.FINISHED)

    async def _check_start(self, now: float) -> None:
        missing, limit_s = self.book.missing(), self.args.controller.start_deadline_s
        if not missing:
            await self._move(RunState.RUNNING)
        elif now - self.book.started_at > limit_s:
            await self._fail(f"{', '.join(missing)} not up within {limit_s:g} s")

    async def _move(self, state: RunState) -> None:
        self.run = self.run.move(state)
        await asyncio.to_thread(save_phase, self.store, self.run, self.life)

    def _watch(self, now: float) -> None:
        """Say who waits for whom when no counter has moved for `stall_s` (B46)."""
        if self.bus.stats is None or self.run.state is not RunState.RUNNING:
            return
        stall = find_stall(self.book.snapshots(), bus_snapshot(self.bus.stats, now), now, self.args.controller.stall_s)
        if stall is not None and not self.stalled:
            logger.warning("%s", stall.text())
        self.stalled = [] if stall is None else [stall.text()]

    def _export_live(self, now: float) -> None:
        engine = self.config.get("rollout", {}).get("engine", {})
        self.live.export(
            self.book,
            self.bus.stats,
            self.run.state,
            self.stalled,
            {tracker.name: tracker.errors for tracker in self.sinks.trackers},
            engine.get("dtype", "float32"),
            now,
            self.log.fault_counts(),
        )

    async def _fail(self, reason: str) -> None:
        await self._end(RunState.FAILED, reason)

    async def _end(self, state: RunState, reason: str = "") -> None:
        """Write the summary and the report, then tell everybody through their heartbeats."""
        async with self._closing:
            if self.run.ended:
                return
            for operation in self.log.open_operations():
                await self.log.cancel(operation.id, f"the run has {state}")
            await asyncio.to_thread(self.sinks.close, TRACKERS_DEADLINE_S)
            closed = await asyncio.to_thread(
                close_run,
                self.book,
                self.folder,
                self.bus.stats,
                time.time() - self.life.began_s,
                state,
                reason,
                self.sinks.troubles(),
                self.log,
            )
            self.summary, self.violations = closed.summary, closed.violations
            ended_at = await asyncio.to_thread(serve_apps.deployed_at, names.CONTROLLER)
            self.run, self.life = self.run.move(state, reason), replace(self.life, ended_at=ended_at)
            await asyncio.to_thread(save_phase, self.store, self.run, self.life)
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
        await self.bus.destroy()

    def __del__(self) -> None:
        """Serve ends this replica: its loops would find no threads any more."""
        for task in getattr(self, "_tasks", ()):
            task.cancel()

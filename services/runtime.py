"""What every role needs inside its replica: paths, calls with deadlines, heartbeats, its time split and spans."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from relax.config.run import RunConfig
from relax.faults import FaultPoints
from relax.telemetry.run_folder import RunFolder, RunFolderError
from relax.telemetry.time_split import TimeSplit
from relax.telemetry.trace import Tracer
from relax.types import RelaxError
from services import names
from services.controller.api import Directive, Heartbeat, RunInfo
from services.controller.processes import own_process

logger = logging.getLogger("ray.serve")
T = TypeVar("T")

CALL_DEADLINE_S = 20.0
"""Default deadline of a call between services."""
HEARTBEAT_DEADLINE_S = 10.0
"""One that is not taken within this time is lost, and counted: the next one says more."""
REPORT_AGAIN_S = 0.5
START_DEADLINE_S = 180.0
"""Longest wait for another service to come up: they are deployed in parallel and import torch."""


class ServiceUnavailable(RelaxError):
    """Another service did not answer within the deadline; says which call."""


def run_folder_path(run: RunConfig) -> Path:
    """Relative run folders hang under RELAX_HOME, else under the folder that Ray was started in."""
    path = Path(run.run_dir).expanduser()
    return path if path.is_absolute() else Path(os.environ.get("RELAX_HOME", os.getcwd())) / path


def limit_threads(run: RunConfig) -> None:
    import torch

    torch.set_num_threads(run.threads)


@dataclass(frozen=True, slots=True)
class ServePlace:
    """`url` of Serve's HTTP proxy as this node reaches it; `logs`: folder of this node's replicas."""

    url: str
    logs: str


def serve_place() -> ServePlace:
    from ray.serve._private.logging_utils import get_serve_logs_dir
    from ray.serve.context import _get_global_client

    http = _get_global_client().http_config
    host = "127.0.0.1" if http.host in ("0.0.0.0", "::", None) else http.host
    return ServePlace(f"http://{host}:{http.port}", get_serve_logs_dir())


_handles: dict[str, DeploymentHandle] = {}
"""Handles follow replicas that come and go; to look one up costs a round trip to Serve's controller."""


def asked_to_end() -> bool:
    """Of the present task, on a CancelledError: was it meant? Else what it awaited was cancelled: a fault."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def call(app: str, method: str, *args: Any, deadline_s: float = CALL_DEADLINE_S) -> Any:
    """One call to the ingress deployment of an application.

    Raises `ServiceUnavailable` past the deadline and when its replica died meanwhile, and the `RelaxError` that the
    service raised.
    """

    async def once() -> Any:
        if app not in _handles:
            _handles[app] = serve.get_app_handle(app)
        return await getattr(_handles[app], method).remote(*args)

    try:
        return await asyncio.wait_for(once(), deadline_s)
    except TimeoutError as error:
        raise ServiceUnavailable(f"{app}.{method} gave no answer within {deadline_s:g} s") from error
    except RayTaskError as error:
        if isinstance(error.cause, RelaxError):
            raise error.cause from error
        raise
    except RayError as error:  # the replica died, or its node cannot be reached
        raise ServiceUnavailable(f"{app}.{method}: {type(error).__name__}") from error


async def call_when_up(app: str, method: str, *args: Any, deadline_s: float = START_DEADLINE_S) -> Any:
    """As `call`, for a service that may not exist yet: tries again until the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        remaining = end - time.monotonic()
        if remaining <= 0:
            raise ServiceUnavailable(f"{app}.{method}: the service did not come up within {deadline_s:g} s")
        try:
            return await call(app, method, *args, deadline_s=min(remaining, CALL_DEADLINE_S))
        except (RayServeException, ServiceUnavailable) as error:
            logger.debug("waiting for %s: %s", app, error)
            await asyncio.sleep(0.2)


class RoleReporter:
    """The replica's own account of itself, sent to the controller each interval.

    Counters only grow; the controller reads progress from their change. An exception of the role's
    main loop is sent as the role's error and also makes `check_health` fail, so that both detection
    paths see it.
    """

    def __init__(self, role: str, instance: str, run: RunConfig):
        self.role, self.instance, self.interval_s = role, instance, 1.0
        self.state = "starting"
        self.waiting_for = ""
        self.counters: dict[str, float] = {}
        self.facts: dict[str, Any] = {}
        self.time_split = TimeSplit()
        self.error: str | None = None
        self.fatal: str | None = None
        self.directive = Directive()
        self.refresh: Callable[[], None] = lambda: None
        """Called before each report, to bring `facts` up to date."""
        self.stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        context = serve.get_replica_context()
        self.replica_id = context.replica_id.unique_id
        self.owner = f"{instance}-{context.rank.rank if context.rank else 0}"
        """Who this replica is in the bus; its successor takes the name over and fences it."""
        self._folder = RunFolder(run_folder_path(run))
        self.faults = FaultPoints(run.fault_points, (role, instance, self.owner), self._folder.path)
        first = not context.rank or context.rank.rank == 0
        self.place = instance if first else self.owner
        """What the controller calls this replica."""
        self.trace = Tracer(run.trace_share, role, self.place)
        self._app = context.app_name
        self._process = own_process(ray.get_runtime_context().get_node_id())
        self._reports: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._reported = asyncio.Condition()
        self._reporting = False
        self._beats = 0

    def count(self, name: str, amount: float = 1.0) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount

    def spawn(self, loop_function: Callable[[], Awaitable[None]]) -> None:
        """Run one of the role's loops; its exception becomes the role's error."""

        async def supervised() -> None:
            try:
                await loop_function()
                await self.write_trace()
            except asyncio.CancelledError as error:
                if not asked_to_end():
                    self.fail(error)
                raise
            except Exception as error:  # the one supervisor border of this process: recorded and reported
                if not self.stopped.is_set():
                    self.fail(error)

        task = asyncio.get_running_loop().create_task(supervised())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def fail(self, error: BaseException) -> None:
        self.error = "".join(traceback.format_exception(error)).strip()
        self.state = "failed"
        logger.error("%s failed: %s", self.instance, self.error)

    def end_run(self, reason: str) -> None:
        """Ask the controller to end the run as failed, with the reason."""
        self.fatal = self.fatal or reason

    def check(self) -> None:
        """Raise the error of a failed loop; for `check_health`."""
        if self.error is not None:
            raise RuntimeError(self.error)

    # ------------------------------------------------------------------ what the controller is to know for certain

    def tell(self, method: str, *args: Any) -> None:
        """Have the controller told, after what it was to be told before; repeated until it has answered.

        It may be told twice. On the replica's loop. What the controller refuses ends the run.
        """
        self._reports.append((method, args))
        self.facts["reports_waiting"] = len(self._reports)
        if not self._reporting:
            self._reporting = True
            self.spawn(self._send_reports)

    async def told(self) -> None:
        """Wait until nothing is left to tell, or the run has ended."""
        async with self._reported:
            await self._reported.wait_for(lambda: not self._reports)

    async def _send_reports(self) -> None:
        while self._reports:
            method, args = self._reports[0]
            try:
                await call(names.CONTROLLER, method, *args)
            except (RayServeException, ServiceUnavailable) as error:
                if not self.stopped.is_set():
                    self.count("reports_repeated")
                    logger.warning("%s: %s is told again: %s", self.instance, method, error)
                    await asyncio.sleep(REPORT_AGAIN_S)
                    continue
            except (RelaxError, RayTaskError) as error:
                self.end_run(f"the controller refuses {method}: {error}")
                raise
            self._reports.popleft()
            self.facts["reports_waiting"] = len(self._reports)
            async with self._reported:
                self._reported.notify_all()
        self._reporting = False

    async def join(self, section: dict[str, Any]) -> RunInfo:
        """Wait for the controller, hand it this role's part of the resolved configuration, begin reporting."""
        info: RunInfo = await call_when_up(names.CONTROLLER, "join", self.role, section)
        self.interval_s = info.heartbeat_s
        logger.info("%s joined run %s, process %d", self.instance, info.run_id, os.getpid())
        self.start()
        return info

    def start(self) -> None:
        task = asyncio.get_running_loop().create_task(self._beat())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _beat_now(self) -> Heartbeat:
        self.refresh()
        self._beats += 1
        return Heartbeat(
            role=self.role,
            instance=self.place,
            replica_id=self.replica_id,
            pid=os.getpid(),
            state=self.state,
            waiting_for=self.waiting_for,
            counters=dict(self.counters),
            facts=dict(self.facts),
            time_split=self.time_split.snapshot(),
            error=self.error,
            fatal=self.fatal,
            stopping=self.stopped.is_set(),
            app=self._app,
            node=self._process.node,
            started_s=self._process.started_s,
            number=self._beats,
        )

    async def send(self) -> None:
        beat = self._beat_now()
        await self.write_trace()  # after the state was taken: who says that it is done has all its spans on disk
        self.directive = await call(names.CONTROLLER, "heartbeat", beat, deadline_s=HEARTBEAT_DEADLINE_S)
        if self.directive.stop:
            self.stopped.set()

    async def write_trace(self) -> None:
        """What the disk refuses is dropped and counted: a run does not fail for its trace."""
        if not self.trace.pending:
            return
        try:
            await asyncio.to_thread(self.trace.write, self._folder)
        except RunFolderError as error:
            self.facts["trace_error"] = str(error)
            logger.error("%s: spans dropped: %s", self.instance, error)
        if self.trace.dropped:
            self.counters["spans_dropped"] = float(self.trace.dropped)

    async def _beat(self) -> None:
        while True:
            heard = self.stopped.is_set()
            try:
                await self.send()
                if self.stopped.is_set() and not heard:
                    await self.send()  # the end of the run waits until everybody says that it has heard of it
            except (RayServeException, ServiceUnavailable) as error:
                self.count("heartbeats_lost")
                logger.debug("heartbeat lost: %s", error)
            await asyncio.sleep(self.interval_s)

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()

"""`relax run`: deploy a file on a private (or given) Ray, watch it, end it cleanly."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.live import Live

from relax.cli.cluster import ClusterError, Dashboard, PrivateRay, free_ports
from relax.cli.guardian import Guard
from relax.cli.live import one_line, view
from relax.config.file import ConfigError, load_run_file
from relax.config.sections import RunFile
from relax.telemetry.run_folder import RunFolder
from relax.types import RelaxError

FINAL = ("finished", "failed", "stopped")
POLL_S = 1.0
TAKE_DOWN_S = 40.0
"""For services, weights and bus to go, once all roles have stopped."""
RUN_FILE = "run_file.yaml"
"""In the run folder: the run file with all that was set on the command line."""
STATE_FILE = "state.json"
"""In the run folder: the id of the run."""


@dataclass(slots=True)
class Outcome:
    state: str
    reason: str | None
    summary: dict[str, Any] | None
    violations: list[str]

    @property
    def exit_code(self) -> int:
        return 0 if self.state == "finished" and not self.violations else 1


class ControlClient:
    """The controller's HTTP API."""

    def __init__(self, url: str):
        self.url = url
        self.silence = ""
        """Why the last call of `status` got no answer; empty when it did."""

    def status(self, deadline_s: float = 10.0) -> dict[str, Any] | None:
        """None while the controller is not up, or does not answer in time."""
        try:
            response = httpx.get(f"{self.url}/api/v1/status", timeout=deadline_s, trust_env=False)
        except httpx.HTTPError as error:
            self.silence = str(error) or type(error).__name__
            return None
        if response.status_code != 200:
            self.silence = f"status {response.status_code}"
            return None
        self.silence = ""
        body: dict[str, Any] = response.json()
        return body

    def stop(self, deadline_s: float = 300.0) -> None:
        """Raises `ClusterError` when the controller refuses or does not answer in time."""
        try:
            httpx.post(f"{self.url}/api/v1/stop", timeout=deadline_s, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            raise ClusterError(f"POST {self.url}/api/v1/stop: {error or type(error).__name__}") from error


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A deployed run, for who looks on beside the watch, in a thread of its own, until `over` is set."""

    control: ControlClient
    ray: PrivateRay
    run_dir: Path
    over: threading.Event


During = Callable[[LiveRun], None]


def run_file(path: Path, overrides: Sequence[str], *, overwrite: bool, address: str | None) -> int:
    """Check and run a file, print what comes of it, and return the exit code of `relax run`."""
    console = Console()
    end_by_signal()
    try:
        file = load_run_file(path, overrides)
        run_dir = run_dir_of(file)
        outcome = run_and_watch(file, run_dir, overwrite=overwrite, console=console, address=address)
    except RelaxError as error:
        return fail(console, error)
    except KeyboardInterrupt:
        console.print("interrupted: everything was stopped", style="yellow")
        return 130
    report_outcome(outcome, run_dir, console)
    return outcome.exit_code


def end_by_signal() -> None:
    """SIGTERM, and the end of the terminal unless it was to be survived (nohup), end as cleanly as Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def run_dir_of(file: RunFile) -> Path:
    """Relative run folders hang under RELAX_HOME, else under the present folder."""
    return Path(os.environ.get("RELAX_HOME", os.getcwd())) / Path(file.run.run_dir).expanduser()


def run_and_watch(
    file: RunFile,
    run_dir: Path,
    *,
    overwrite: bool,
    console: Console,
    address: str | None = None,
    during: During | None = None,
) -> Outcome:
    """Check the file, run it to its end, and take everything down. `during`: see `LiveRun`; on a private Ray only."""
    from relax.cli.check import check

    report = check(file, check_port=address is not None, run_dir=run_dir)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    prepare_run_dir(run_dir, overwrite=overwrite)
    token = os.environ.get("RAY_AUTH_TOKEN")
    return deploy_and_watch(file, run_dir, dashboard_url=address, token=token, console=console, during=during)


def prepare_run_dir(run_dir: Path, *, overwrite: bool) -> None:
    """Refuse to mix two runs in one folder."""
    if run_dir.exists() and any(run_dir.iterdir()):
        if not overwrite:
            raise ConfigError([f"{run_dir} holds a run already: choose another run.run_dir, or --overwrite it"])
        known = {"run.json", "config.json", "metrics.jsonl", "ledger.sqlite", "logs", "model"}
        if not known & {entry.name for entry in run_dir.iterdir()}:
            raise ConfigError([f"{run_dir} is not a run folder: refusing to overwrite it"])
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)


def document_for(file: RunFile, run_dir: Path, port: int | None) -> dict[str, Any]:
    """The Serve document with the run folder made absolute and, on a private Ray, a free port."""
    document = copy.deepcopy(file.serve)
    for application in document["applications"]:
        application["args"]["run"] = {**application["args"]["run"], "run_dir": str(run_dir)}
    if port is not None:
        document["http_options"] = {**(document.get("http_options") or {}), "port": port}
    return document


def store_run_file(file: RunFile, run_dir: Path) -> None:
    """What `relax resume` starts from."""
    text = yaml.safe_dump(document_for(file, run_dir, None), sort_keys=False)
    RunFolder(run_dir).write_text(run_dir / RUN_FILE, text)


def deploy_and_watch(
    file: RunFile,
    run_dir: Path,
    *,
    dashboard_url: str | None,
    token: str | None,
    console: Console,
    keep_port: bool = False,
    during: During | None = None,
) -> Outcome:
    """Start, watch until the run has ended, and take everything down again."""
    private: PrivateRay | None = None
    guard: Guard | None = None
    control: ControlClient | None = None
    dashboard = Dashboard(dashboard_url, token) if dashboard_url else None
    try:
        if dashboard is None:
            console.print("Starting a private Ray ...", style="dim")
            guard = guard_over(file, run_dir)
            private = PrivateRay.start(guard=guard)
            guard.record_keep(serve_logs(private), run_dir / "logs")
            dashboard = private.dashboard
        port = None if private is None or keep_port else free_ports(1)[0]
        store_run_file(file, run_dir)
        document = document_for(file, run_dir, port)
        http = document.get("http_options") or {}
        control = ControlClient(f"http://{http.get('host', '127.0.0.1')}:{http.get('port', 8000)}")
        RunFolder(run_dir).write_place(
            url=control.url,
            ray_folder=str(private.folder) if private else None,
            started_at=time.time(),
            home=os.getcwd(),
        )
        console.print(f"Deploying the services; API at {control.url}/docs", style="dim")
        dashboard.deploy(document)
        if during is None or private is None:
            return watch(control, dashboard, file, console)
        with looking_on(during, LiveRun(control, private, run_dir, threading.Event())):
            return watch(control, dashboard, file, console)
    finally:
        with uninterrupted():
            if control is not None:
                console.print("Stopping the services ...", style="dim")
                _take_down(control, console, file.controller.stop_deadline_s + TAKE_DOWN_S)
            if private is not None:
                keep_logs(private, run_dir)
                private.stop()
                remove_weights(file, run_dir)
            elif dashboard is not None:
                dashboard.delete()
            if guard is not None:
                guard.close()


def guard_over(file: RunFile, run_dir: Path) -> Guard:
    """Who takes everything down should this process be killed."""
    guard = Guard()
    guard.record_log(run_dir / "logs" / "guardian.log")
    guard.record_shared_memory(Path(file.dcs.shm_dir), f"relax-{file.run.name}-", run_dir / STATE_FILE)
    return guard


LOOK_DEADLINE_S = 30.0


@contextlib.contextmanager
def looking_on(during: During, live: LiveRun) -> Iterator[None]:
    """`during` beside the body, until it is through. What it raises is raised here, at the end of the body."""
    raised: list[BaseException] = []

    def look() -> None:
        try:
            during(live)
        except BaseException as error:  # the border of the thread: passed on
            raised.append(error)

    thread = threading.Thread(target=look, name="during", daemon=True)
    thread.start()
    try:
        yield
    finally:
        live.over.set()
        thread.join(LOOK_DEADLINE_S)
    if raised:
        raise raised[0]


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave half of the processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _take_down(control: ControlClient, console: Console, deadline_s: float) -> None:
    """Ask the services to end; what does not answer goes down with its Ray."""
    if control.status(deadline_s=5.0) is None:
        return
    try:
        control.stop(deadline_s=deadline_s)
    except ClusterError as error:
        console.print(f"warning: the services did not end by themselves: {error}", style="yellow", markup=False)


def remove_weights(file: RunFile, run_dir: Path) -> None:
    """Shared memory of the run, in case its checkpoint service had no time to free it."""
    state = run_dir / STATE_FILE
    if state.exists():
        run_id = json.loads(state.read_text())["run_id"]
        for folder in Path(file.dcs.shm_dir).glob(f"relax-{file.run.name}-{run_id}*"):  # the store, and copies of it
            shutil.rmtree(folder, ignore_errors=True)


def serve_logs(private: PrivateRay) -> Path:
    return private.folder / "ray" / "session_latest" / "logs" / "serve"


def keep_logs(private: PrivateRay, run_dir: Path) -> None:
    """The private Ray's folder goes away; its service logs stay with the run."""
    source = serve_logs(private)
    if source.is_dir():
        shutil.copytree(source, run_dir / "logs", dirs_exist_ok=True, ignore_dangling_symlinks=True)
    start_log = private.folder / "ray-start.log"
    if start_log.exists():
        (run_dir / "logs").mkdir(exist_ok=True)
        shutil.copy(start_log, run_dir / "logs" / "ray-start.log")


def watch(control: ControlClient, dashboard: Dashboard, file: RunFile, console: Console) -> Outcome:
    """Until the run has ended, or its controller has been silent for `controller.start_deadline_s`."""
    silence_s = file.controller.start_deadline_s
    heard_at = time.monotonic()
    coming_up = True
    show = _printer(console)
    with show.context:
        while True:
            status = control.status()
            if status is not None:
                heard_at = time.monotonic()
                coming_up = status["state"] == "starting"
                show.update(status)
                if status["state"] in FINAL:
                    return Outcome(
                        status["state"], status.get("reason"), status.get("summary"), status.get("violations", [])
                    )
            # Serve's own status is costly, and only says more while services come up: later the controller, itself
            # replaced where it must be, deals with what could not be deployed.
            failed = _deploy_failures(dashboard) if coming_up else None
            if failed:
                return Outcome("failed", failed, None, [])
            if time.monotonic() - heard_at > silence_s:
                reason = f"the controller has not answered for {silence_s:g} s: {control.silence}"
                return Outcome("failed", reason, None, [])
            time.sleep(POLL_S)


def _deploy_failures(dashboard: Dashboard) -> str | None:
    for name, application in dashboard.applications().items():
        if application["status"] == "DEPLOY_FAILED":
            details = "; ".join(
                item.get("message", "") for item in application.get("deployments", {}).values() if item.get("message")
            )
            return f"application '{name}' could not be deployed: {application.get('message', '')} {details}".strip()
    return None


@dataclass(slots=True)
class _Printer:
    context: Any
    update: Callable[[dict[str, Any]], None]


def _printer(console: Console) -> _Printer:
    if console.is_terminal:
        live = Live(console=console, refresh_per_second=4, transient=False)
        return _Printer(live, lambda status: live.update(view(status)))
    seen = {"step": -1, "state": ""}

    def update(status: dict[str, Any]) -> None:
        if status["state"] != seen["state"]:
            console.print(f"[{status['wall_s']:7.1f} s] {status['state']} {status.get('reason') or ''}", markup=False)
        if status["step"] != seen["step"] and (status["step"] % 5 == 0 or status["step"] == status["steps"]):
            console.print(f"[{status['wall_s']:7.1f} s] {one_line(status)}", markup=False, soft_wrap=True)
        seen.update(step=status["step"], state=status["state"])

    return _Printer(contextlib.nullcontext(), update)


HEADLINE_KEYS = """
steps wall_s reward_first reward_last accuracy_last logprob_gap_max logprob_gap_mean produced trained dropped queued
restarts_unasked digest_ok overhead_ms_per_step eval_before eval_after eval_gain_lower95
""".split()


def report_outcome(outcome: Outcome, run_dir: Path, console: Console) -> None:
    """The headline of the summary, what was not met, and where the rest is."""
    if outcome.summary:
        shown = {key: outcome.summary[key] for key in HEADLINE_KEYS if outcome.summary.get(key) is not None}
        console.print_json(json.dumps(shown))
        for name, trouble in (outcome.summary.get("tracker_errors") or {}).items():
            console.print(f"warning: tracker {name}: {trouble}", style="yellow", markup=False)
    for violation in outcome.violations:
        console.print(f"not met: {violation}", style="red", markup=False)
    if outcome.state != "finished":
        console.print(f"{outcome.state}: {outcome.reason}", style="red", markup=False)
    console.print(f"run folder: {run_dir}   report: {run_dir / 'report.html'}", markup=False, soft_wrap=True)


def fail(console: Console, error: Exception) -> int:
    for line in error.problems if isinstance(error, ConfigError) else [str(error)]:
        console.print(f"error: {line}", style="red", markup=False, soft_wrap=True)
    return 2 if isinstance(error, ConfigError) else 1

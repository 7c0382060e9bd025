"""`relax chaos`: run a file while faults strike its processes, and say whether it withstood them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from relax.cli import processes
from relax.cli.options import FileArgument, SetOption
from relax.cli.run import LiveRun, Outcome, fail, run_and_watch, run_dir_of
from relax.config.file import ConfigError, load_run_file
from relax.config.sections import RunFile
from relax.control.chaos import (
    ChaosError,
    Conductor,
    Ended,
    How,
    Planned,
    Seen,
    Strike,
    Verdict,
    View,
    default_pool,
    known_faults,
    parse_faults,
    plan,
    verdict,
)
from relax.faults import arm, fired
from relax.types import RelaxError
from services.rollout.ledger import Ledger, TerminalState

POLL_S = 0.25
STATUS_DEADLINE_S = 2.0
SLOW_S = 5.0
"""How long a slow process is stopped every other moment."""
CRASH_S = 1.0
"""After which a pool is asked whether it goes on."""


def chaos(
    file: FileArgument,
    faults: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: kill:actor, hang:instance, kill:dcs:dcs_mid_publish, slow:ref@12 (at step 12)"
        ),
    ] = None,
    kills: Annotated[int, typer.Option(min=0, help="Faults drawn from those without @STEP, evenly over the run")] = 10,
    seed: Annotated[int, typer.Option(help="Draws faults, steps and victims")] = 1,
    overrides: SetOption = [],  # noqa: B006 (typer reads the default)
    overwrite: Annotated[bool, typer.Option(help="Replace an existing run in the run folder")] = False,
    reward_min: Annotated[float | None, typer.Option(help="Mean reward of the last steps at least")] = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="On a simulated clock, with the real bus, ledger and manager; no Ray")
    ] = False,
    list_faults: Annotated[bool, typer.Option("--list", help="Print the names of all faults")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Run a file while its processes are killed, stopped and cut off; check that nothing was lost or trained twice.

    Without --faults everything is killed, at any time and at the points that hurt most. Exit code 0: the run went
    through as if nothing had happened; 1: not so; 2: the file or a fault is wrong; 130: Ctrl-C.
    """
    console = Console(stderr=as_json)
    if list_faults:
        print("\n".join(known_faults()))
        raise typer.Exit(0)
    if simulated:
        if faults is not None:
            raise typer.BadParameter("the simulation draws its own faults", param_hint="--faults")
        raise typer.Exit(_simulate(console, file, overrides, kills, seed, as_json))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        loaded, planned = prepare(file, overrides, faults, kills, seed)
        run_dir = run_dir_of(loaded)
        conductor = Conductor(planned)
        outcome = run_and_watch(
            loaded,
            run_dir,
            overwrite=overwrite,
            console=console,
            during=lambda live: Injector(
                live, conductor, lambda text: console.print(text, markup=False, emoji=False, soft_wrap=True)
            ).run(),
        )
        ended = read_end(outcome, loaded, run_dir)
    except ChaosError as error:
        raise typer.Exit(fail(console, ConfigError([str(error)]))) from None
    except RelaxError as error:
        raise typer.Exit(fail(console, error)) from None
    except KeyboardInterrupt:
        console.print("interrupted: everything was stopped", style="yellow")
        raise typer.Exit(130) from None
    result = verdict(ended, conductor, reward_min)
    if as_json:
        print(json.dumps(to_json(conductor, ended, result)))
    else:
        _print(console, conductor, ended, result)
    raise typer.Exit(0 if result.ok else 1)


def roles_of(file: RunFile) -> list[str]:
    """The roles that a run of this file has."""
    roles = ["actor", "dcs", "rollout"]
    roles += ["instance", "reward"] if file.run.generates else []
    return [*roles, *(["ref"] if file.run.use_ref else [])]


def prepare(
    path: Path, overrides: Sequence[str], faults: str | None, kills: int, seed: int
) -> tuple[RunFile, list[Planned]]:
    """The file with what its processes have to know of the faults, and the plan. Raises `ChaosError`, `ConfigError`."""
    file = load_run_file(path, overrides)
    roles = roles_of(file)
    pool, scheduled = (default_pool(roles), []) if faults is None else parse_faults(faults, roles)
    planned = plan(pool, kills, seed, file.run.steps, scheduled)
    if not planned:
        raise ChaosError("there is no fault to inject: --kills 0 needs one with @STEP in --faults")
    points = {point.name: point for item in planned if (point := item.fault.fault_point) is not None}
    points |= {point.name: point for point in file.run.fault_points}
    losses = sum(item.fault.lethal and item.fault.role in ("bus", "store") for item in planned)
    settings = [
        *overrides,
        f"run.fault_points={json.dumps([point.model_dump(mode='json') for point in points.values()])}",
        f"controller.recovery.bus_budget={file.controller.recovery.bus_budget + losses}",
    ]
    return load_run_file(path, settings), planned


class Injector:
    """Looks at the run, asks the conductor what is due, and does it. Of this run's own Ray alone."""

    def __init__(self, live: LiveRun, conductor: Conductor, tell: Callable[[str], None]) -> None:
        self._live, self._conductor, self._tell = live, conductor, tell
        self._begin = time.monotonic()
        self._replicas: dict[str, Seen] = {}
        self._step = 0
        self._running = False
        self._answers = 0
        self._bus: object = None
        self._slowed: dict[int, tuple[Strike, float]] = {}
        self._crashed: list[tuple[Strike, float]] = []
        self._stopped: set[int] = set()

    def run(self) -> None:
        try:
            while not self._live.over.wait(POLL_S):
                view = self._look()
                self._conductor.observe(view, self._now())
                self._go_on(view)
                due = self._conductor.due(view)
                if due is not None:
                    self._inject(*due, view)
            self._conductor.observe(self._look(), self._now())
        finally:
            for pid in self._stopped:  # nobody is left standing
                self._signal(pid, signal.SIGCONT)

    def _now(self) -> float:
        return time.monotonic() - self._begin

    # ------------------------------------------------------------------ what is there

    def _look(self) -> View:
        """The controller's word, and Ray's own processes where it sends no heartbeats."""
        status = self._live.control.status(STATUS_DEADLINE_S)
        if status is not None:
            self._answers += 1
            self._step = max(self._step, int(status["step"]))
            self._running = status["state"] == "running"
            self._bus = status["bus"].get("produced")
            self._replicas = {
                role["instance"]: Seen(
                    role["role"], role["pid"], _state_of(role), tuple(sorted(role["counters"].items()))
                )
                for role in status["roles"]
            }
        seen = dict(self._replicas)
        for name, pid in processes.hosts(self._live.ray.folder).items():
            progress = self._bus if name in ("bus", "store") else self._answers
            seen[name] = Seen(name, pid, "running", progress)
        return View(self._step, self._running, seen)

    # ------------------------------------------------------------------ what is done

    def _inject(self, planned: Planned, victim: str, view: View) -> None:
        fault, pid = planned.fault, view.seen[victim].pid
        if not processes.belongs(pid, self._live.ray.folder):
            return  # it is being replaced: the next look shows by which
        point = fault.fault_point
        self._tell(f"[chaos {self._now():7.1f} s] {fault}: {victim}, process {pid}, at step {view.step}")
        strike = self._conductor.struck(planned, victim, view, self._now(), armed=point is not None)
        if point is not None:
            arm(point, self._live.run_dir, victim)
        elif fault.how is How.KILL:
            self._signal(pid, signal.SIGKILL)
        elif fault.how is How.HANG:
            self._stop(pid)
        elif fault.how is How.SLOW:
            self._slowed[pid] = (strike, self._now() + SLOW_S)
        elif fault.how is How.CRASH:
            for worker in processes.children(pid)[:1]:
                self._signal(worker, signal.SIGSEGV)
            self._crashed.append((strike, self._now() + CRASH_S))

    def _go_on(self, view: View) -> None:
        """With the faults that take time."""
        now = self._now()
        for pid, (strike, until) in list(self._slowed.items()):
            if now < until and pid not in self._stopped:
                self._stop(pid)
                continue
            self._signal(pid, signal.SIGCONT)
            self._stopped.discard(pid)
            if now >= until:
                del self._slowed[pid]
                self._conductor.ended(strike, view, now)
        for strike, until in list(self._crashed):
            if now >= until:
                self._crashed.remove((strike, until))
                self._conductor.ended(strike, view, now)
        for strike in self._conductor.strikes:
            point = strike.fault.fault_point
            if strike.at_s is None and point is not None and fired(point, self._live.run_dir):
                self._conductor.fired(strike, now)
                if not strike.fault.lethal:
                    self._conductor.ended(strike, view, now)

    def _stop(self, pid: int) -> None:
        self._signal(pid, signal.SIGSTOP)
        self._stopped.add(pid)

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _state_of(role: dict[str, Any]) -> str:
    return "failed" if role["error"] else str(role["state"])


# ---------------------------------------------------------------------- the end


def read_end(outcome: Outcome, file: RunFile, run_dir: Path) -> Ended:
    """What summary and ledger of the ended run say."""
    summary = outcome.summary or {}
    ended = Ended(
        state=outcome.state,
        reason=outcome.reason,
        violations=tuple(outcome.violations),
        steps=int(summary.get("steps", 0)),
        reward_last=summary.get("reward_last"),
        produced=int(summary.get("produced", 0)),
        trained=int(summary.get("trained", 0)),
        dropped=int(summary.get("dropped", 0)),
        queued=int(summary.get("queued", 0)),
    )
    path = run_dir / "ledger.sqlite"
    if not path.exists():
        return ended
    with Ledger(path, read_only=True) as ledger:
        counts = ledger.counts()
        return dataclasses.replace(
            ended,
            admitted=counts.admitted,
            next_seq=ledger.next_seq,
            open=counts.open,
            refused=counts.refused,
            trained_samples=ledger.sample_fates()["trained"],
            trained_by_step=Counter(
                terminal.step for terminal in ledger.terminals(TerminalState.TRAINED) if terminal.step is not None
            ),
        )


def to_json(conductor: Conductor, ended: Ended, result: Verdict) -> dict[str, Any]:
    return {
        "ok": result.ok,
        "broken": result.broken,
        "injected": sum(strike.at_s is not None for strike in conductor.strikes),
        "faults": [
            {
                "fault": str(strike.fault),
                "victim": strike.victim,
                "step": strike.step,
                "at_s": _rounded(strike.at_s),
                "detected_s": _since(strike, strike.detected_s),
                "recovered_s": _since(strike, strike.recovered_s),
                "first_progress_s": _since(strike, strike.progressed_s),
            }
            for strike in conductor.strikes
        ],
        "restarts": dict(sorted(conductor.restarts.items())),
        "run": {**dataclasses.asdict(ended), "trained_by_step": None},
    }


def _since(strike: Strike, at_s: float | None) -> float | None:
    """Seconds after the fault."""
    return None if at_s is None or strike.at_s is None else round(at_s - strike.at_s, 2)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _print(console: Console, conductor: Conductor, ended: Ended, result: Verdict) -> None:
    table = Table(title="faults; times in seconds after each", title_justify="left")
    for column in ("at (s)", "step", "fault", "process", "detected", "recovered", "first progress"):
        table.add_column(column)
    for strike in conductor.strikes:
        times = (strike.detected_s, strike.recovered_s, strike.progressed_s)
        shown = ["-" if (since := _since(strike, at_s)) is None else f"{since:.1f}" for at_s in times]
        at = "not reached" if strike.at_s is None else f"{strike.at_s:.1f}"
        table.add_row(at, str(strike.step), str(strike.fault), strike.victim, *shown)
    console.print(table, emoji=False)
    console.print(
        f"{ended.steps} steps, reward {ended.reward_last}; {ended.produced} produced = {ended.trained} trained + "
        f"{ended.dropped} dropped + {ended.queued} queued; {ended.admitted} groups, {ended.open} without an end",
        markup=False,
        soft_wrap=True,
    )
    restarts = ", ".join(f"{name} {count}" for name, count in sorted(conductor.restarts.items())) or "none"
    console.print(f"restarts: {restarts}", markup=False, soft_wrap=True)
    for sentence in result.broken:
        console.print(f"broken: {sentence}", style="red", markup=False, emoji=False, soft_wrap=True)
    if result.ok:
        console.print("the run withstood them: nothing lost, nothing trained twice", style="green")


# ---------------------------------------------------------------------- on the simulated clock


def _simulate(console: Console, path: Path, overrides: Sequence[str], kills: int, seed: int, as_json: bool) -> int:
    from services.simulation.survival import report_json, survive_file

    try:
        file = load_run_file(path, overrides)
        if not file.run.generates:
            raise ChaosError("--simulated is for runs that generate: run.responses is 'recorded'")
        unbroken, struck, broken = survive_file(file, kills, seed)
    except RelaxError as error:
        fail(console, error)
        return 2
    if as_json:
        print(json.dumps(report_json(unbroken, struck, broken)))
        return 1 if broken else 0
    console.print(
        f"{struck.kills} kills in {struck.simulated_s:.0f} simulated seconds and {struck.steps} steps; "
        f"{struck.lost_calls} calls and {struck.lost_answers} answers lost",
        markup=False,
    )
    for fault, count in sorted(struck.by_fault.items()):
        console.print(f"  {count:4d}  {fault}", markup=False, emoji=False)
    console.print(f"{len(struck.consumed)} groups consumed, {len(unbroken.consumed)} in the unbroken run", markup=False)
    for sentence in broken:
        console.print(f"broken: {sentence}", style="red", markup=False, soft_wrap=True)
    if not broken:
        console.print("as in the unbroken run: nothing lost, nothing trained twice", style="green")
    return 1 if broken else 0

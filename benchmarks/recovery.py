"""How long each role takes to come back after SIGKILL, and what that costs the others.

    python -m benchmarks.recovery --json

One run of the toy task with all services. Its processes are killed one at a time, each role `--kills` times, and each
only once the one before has got on. For each role, in seconds after the kill, by median:

- `detected_s`: the controller, or Ray, knows; `up_s`: its successor serves; `median_s`: it has made its first progress;
- `cold_start_s`: of the same role at the start of this run, from its process to its first word that it is up;
- `limit_s`: the deadline of detection (silence of a replica, or of the bus) + 1.5 x the cold start;
- `others_restarted`: processes of other roles that were replaced though nothing had struck them;
- `lost`, `doubled`: samples of trained steps that are missing, or there twice, by the ledger of the ended run.

`blocked_over_memcpy` is of benchmarks.saving, in a process of its own before the run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from relax.cli.chaos import Injector
from relax.cli.run import LiveRun, Outcome, run_and_watch
from relax.config.file import load_run_file
from relax.config.sections import RunFile
from relax.control.chaos import UP, Conductor, Fault, How, Planned, View
from services.rollout.ledger import Ledger, TerminalState

TINY = Path(__file__).parents[1] / "deploy" / "tiny_cpu.yaml"
ROLES = ("actor", "ref", "instance", "reward", "dcs", "bus", "controller")
SETTINGS = ("run.steps=1000000", "rollout.eval.prompts=0", "controller.expect={}", "actor.checkpoint_every=50")
FIRST_STEP = 20
SAVING_DEADLINE_S = 300.0
COLD_STARTS = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--kills", type=int, default=5, help="of each role")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds for the whole run")
    options = parser.parse_args()
    figures = {**_saving(), "roles": measure(options.kills, options.deadline, quiet=options.json)}
    if options.json:
        print(json.dumps(figures))
        return
    for role, of_role in figures.pop("roles").items():
        print(f"{role:>12}: {of_role}")
    for name, value in figures.items():
        print(f"{name:>12}: {value}")


def _saving() -> dict[str, Any]:
    """Beside no other work of this process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        figures = pool.submit(_measure_saving).result(SAVING_DEADLINE_S)
    return {"blocked_over_memcpy": figures["blocked_over_memcpy"]}


def _measure_saving() -> dict[str, Any]:
    from benchmarks import saving

    return saving.measure()


def measure(kills: int, deadline_s: float, *, quiet: bool) -> dict[str, dict[str, Any]]:
    """By role. Raises `RuntimeError` when a role did not come back, or the run ended by itself."""
    planned = [Planned(number, Fault(How.KILL, role), FIRST_STEP, 0.0) for number, role in enumerate(ROLES * kills)]
    conductor = Conductor(planned, at_once=1)
    folder = Path(tempfile.mkdtemp(prefix="relax-recovery-"))
    console = Console(stderr=True, quiet=quiet)
    try:
        file = load_run_file(TINY, [*SETTINGS, f"run.run_dir={folder / 'run'}", *_budgets(kills)])
        watcher = Watcher(conductor, deadline_s, console)
        outcome = run_and_watch(file, folder / "run", overwrite=False, console=console, during=watcher.look_on)
        if outcome.state != "stopped" or conductor.pending or not all(strike.over for strike in conductor.strikes):
            left = [str(strike.fault) for strike in conductor.strikes if not strike.over]
            raise RuntimeError(f"the run is {outcome.state} ({outcome.reason}); not back: {left}")
        account = _account(file, folder / "run", outcome)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {role: _of_role(role, file, conductor, watcher.cold_starts, account) for role in ROLES}


def _budgets(kills: int) -> list[str]:
    """So many kills within one window are meant."""
    return [f"controller.recovery.budget={5 + kills}", f"controller.recovery.bus_budget={10 + kills}"]


class Watcher:
    """Kills, and ends the run when all is over."""

    def __init__(self, conductor: Conductor, deadline_s: float, console: Console) -> None:
        self._conductor, self._console = conductor, console
        self._end = time.monotonic() + deadline_s
        self.cold_starts: dict[str, float] = {}

    def look_on(self, live: LiveRun) -> None:
        injector = _Injector(live, self._conductor, lambda words: self._console.print(words, markup=False))
        injector.cold_starts = self.cold_starts
        injector.done = self._done
        injector.run()

    def _done(self) -> bool:
        over = not self._conductor.pending and all(strike.over for strike in self._conductor.strikes)
        return over or time.monotonic() > self._end


class _Injector(Injector):
    cold_starts: dict[str, float]
    done: Any
    _asked_to_stop = False

    def _look(self) -> View:
        view = super()._look()
        for seen in view.seen.values():
            if seen.role not in self.cold_starts and seen.state in UP and view.step < FIRST_STEP:
                try:
                    self.cold_starts[seen.role] = time.time() - psutil.Process(seen.pid).create_time()
                except psutil.NoSuchProcess:
                    continue
        if self.done() and not self._asked_to_stop:
            self._asked_to_stop = True
            self._live.control.stop()
        return view


def _account(file: RunFile, run_dir: Path, outcome: Outcome) -> dict[str, int]:
    """Samples of the trained steps against what each of them must have."""
    run = file.run
    with Ledger(run_dir / "ledger.sqlite", read_only=True) as ledger:
        trained = ledger.terminals(TerminalState.TRAINED)
        through = ledger.trained_through
    groups = Counter(terminal.group_id for terminal in trained)
    by_step = Counter(terminal.step for terminal in trained)
    missing = sum(max(0, run.groups_per_step - by_step[step]) for step in range(1, through + 1))
    more = sum(max(0, by_step[step] - run.groups_per_step) for step in range(1, through + 1))
    twice = sum(count - 1 for count in groups.values())
    summary = outcome.summary or {}
    unbalanced = abs(summary["produced"] - summary["trained"] - summary["dropped"] - summary["queued"])
    return {"lost": missing * run.group_size + unbalanced, "doubled": (more + twice) * run.group_size}


def _of_role(
    role: str, file: RunFile, conductor: Conductor, cold_starts: dict[str, float], account: dict[str, int]
) -> dict[str, Any]:
    strikes = [strike for strike in conductor.strikes if strike.fault.role == role]
    control = file.controller
    deadline_s = control.bus_silence_s if role == "bus" else control.recovery.silence_s
    cold_s = cold_starts[role]

    def median(times: list[float | None]) -> float:
        after = [at - strike.at_s for at, strike in zip(times, strikes, strict=True) if at is not None and strike.at_s]
        return round(statistics.median(after), 2)

    return {
        "median_s": median([strike.progressed_s for strike in strikes]),
        "limit_s": round(deadline_s + COLD_STARTS * cold_s, 2),
        "detected_s": median([strike.detected_s for strike in strikes]),
        "up_s": median([strike.recovered_s for strike in strikes]),
        "cold_start_s": round(cold_s, 2),
        "kills": len(strikes),
        **account,
        "others_restarted": sum(conductor.unasked().values()),
    }


if __name__ == "__main__":
    main()

"""Whether the memory of a run grows with its steps.

    python -m benchmarks.memory --json

All services around simulated engines and a simulated trainer: every lease, row, version and event is real, and a step
takes a fraction of a second. The bus keeps trained rows until a checkpoint covers them, up to `run.bus.max_bytes`;
there is one every 10 steps here, so that they are no slope. Measured after `--warm` steps, over `--steps` more:

- `slope_percent_per_100_steps`: of a line through (step, bytes), over the mean bytes; 1 is the limit;
- `memory_mb`: mean PSS of all that the run has started, Ray included, and its files in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from relax.cli.run import LiveRun, run_and_watch
from relax.config.file import load_run_file

SIM = Path(__file__).parents[1] / "deploy" / "sim_16xh800.yaml"
PROFILE = {
    "gpus": 4,
    "rollout_gpus": 2,
    "lengths": {"mean_tokens": 3500, "sigma": 0.3, "prompt_tokens": 256},
    "engine": {"step_s": 0.0055, "slots": 64},
    "trainer": {"token_gpu_s": 4e-4, "update_s": 1.0, "publish_s": 1.0},
    "time_scale": 50.0,
}
SIZES = (
    "run.groups_per_step=4",
    "run.group_size=4",
    "rollout.instances=2",
    "rollout.engine={backend: simulated, slots: 64}",
    "actor.checkpoint_every=10",
)
POLL_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm", type=int, default=60)
    options = parser.parse_args()
    figures = measure(options.warm, options.steps, quiet=options.json)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>28}: {value}")


def measure(warm: int, steps: int, *, quiet: bool) -> dict[str, Any]:
    """Raises `RuntimeError` when the run fails, or was too short to be measured."""
    seen: dict[int, int] = {}

    def look_on(live: LiveRun) -> None:
        while not live.over.wait(POLL_S):
            status = live.control.status(5.0)
            step = status["step"] if status else 0
            if warm <= step < warm + steps and step not in seen:
                seen[step] = memory_bytes()

    folder = Path(tempfile.mkdtemp(prefix="relax-memory-"))
    console = Console(stderr=True, quiet=quiet)
    try:
        profile = json.dumps(PROFILE)
        settings = [*SIZES, f"run.simulation={profile}", f"run.steps={warm + steps}", f"run.run_dir={folder / 'run'}"]
        file = load_run_file(SIM, settings)
        outcome = run_and_watch(file, folder / "run", overwrite=False, console=console, during=look_on)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if outcome.state != "finished" or len(seen) < 10:
        raise RuntimeError(f"the run is {outcome.state} ({outcome.reason}), measured at {len(seen)} steps")
    mean = statistics.fmean(seen.values())
    slope = float(np.polyfit(list(seen), list(seen.values()), 1)[0])
    return {
        "slope_percent_per_100_steps": round(100.0 * 100.0 * slope / mean, 3),
        "memory_mb": round(mean / 1e6, 1),
        "steps": steps,
        "measured": len(seen),
    }


def memory_bytes() -> int:
    """PSS of all that this process has started, itself not."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


if __name__ == "__main__":
    main()

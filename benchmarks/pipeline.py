"""Colocated against asynchronous training on a simulated cluster: step times, waiting, lag.

    python -m benchmarks.pipeline --json

The profile is `deploy/sim_16xh800.yaml`: the trainer's cost of a token is fitted on the published colocated step alone,
and the asynchronous figures are predictions, printed with their error against the published ones.

`over_limit` is the step time over the longer of generating and of training a step, each measured alone. `sweep`: the
same at staleness 1 with the trainer stretched, so that generating takes 0.5 ... 2 times as long as training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from relax.cli.simulate import as_json, as_table, simulate_modes
from relax.config.file import load_run_file
from relax.config.run import RunConfig
from relax.config.simulation import SimulationConfig
from services.simulation.pipeline import NO_TIME, Pipeline

PROFILE = Path(__file__).parents[1] / "deploy" / "sim_16xh800.yaml"
RATIOS = (0.5, 0.8, 1.0, 1.25, 2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    run = load_run_file(PROFILE, [f"run.steps={options.steps}"]).run
    modes, profile = simulate_modes(run, (0, 1, 2))
    report = as_json(modes, profile.published_s)
    swept = sweep(run, profile.model_copy(update={"mode": "async"}))
    if options.json:
        print(json.dumps({**report, "sweep": swept}))
        return
    print(as_table(report))
    for ratio, row in swept.items():
        print(
            f"rollout/train {ratio:>5}: over limit {row['over_limit']:.3f}, "
            f"trainer waits {row['trainer_wait_share']:.2%}"
        )


def sweep(run: RunConfig, profile: SimulationConfig) -> dict[str, Any]:
    """Staleness 1 at several ratios of generating to training."""
    warm = profile.warm_steps
    rollout_s = Pipeline(run, profile, train_scale=NO_TIME).run().mean_step_s(warm)
    train_s = Pipeline(run, profile, rollout_scale=NO_TIME).run().mean_step_s(warm)
    rows = {}
    for ratio in RATIOS:
        scale = rollout_s / train_s / ratio
        figures = Pipeline(run, profile, train_scale=scale).run()
        alone = Pipeline(run, profile, train_scale=scale, rollout_scale=NO_TIME).run().mean_step_s(warm)
        limit_s = max(rollout_s, alone)
        rows[str(ratio)] = {
            "step_s": round(figures.mean_step_s(warm), 2),
            "over_limit": round(figures.mean_step_s(warm) / limit_s, 4),
            "trainer_wait_share": round(figures.wait_share(warm), 5),
        }
    return rows


if __name__ == "__main__":
    main()

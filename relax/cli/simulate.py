"""`relax simulate`: a run's policies on a simulated clock, beside published figures."""

from __future__ import annotations

from typing import Any

from relax.config.run import Overdue, RunConfig
from relax.config.simulation import SimulationConfig
from relax.simulation.turns import COLOCATE, profile_of
from services.simulation.pipeline import Outcome, outcome


def simulate_modes(run: RunConfig, staleness: tuple[int, ...]) -> tuple[dict[str, Outcome], SimulationConfig]:
    """`colocate` and one asynchronous mode per staleness, and the profile they ran on.

    With a published colocated figure the profile is fitted on it, and on nothing else.
    """
    profile = profile_of(run)
    modes = {COLOCATE: outcome(run, profile.model_copy(update={"mode": COLOCATE}))}
    for value in staleness:
        policy = Overdue.WAIT if value == 0 else Overdue.TRAIN
        own = run.model_copy(update={"max_staleness": value, "overdue": policy, "max_token_lag": None})
        modes[f"staleness_{value}"] = outcome(own, profile.model_copy(update={"mode": "async"}))
    return modes, profile


def as_json(modes: dict[str, Outcome], published: dict[str, float]) -> dict[str, Any]:
    colocate_s = modes[COLOCATE].step_s
    report: dict[str, Any] = {}
    for name, found in modes.items():
        report[name] = {
            "step_s": round(found.step_s, 2),
            "over_limit": None if found.over_limit is None else round(found.over_limit, 4),
            "speedup": round(colocate_s / found.step_s, 3),
            "trainer_wait_share": round(found.trainer_wait_share, 4),
            "lag_histogram": {str(lag): count for lag, count in found.lag_histogram.items()},
        }
        if name in published:
            report[name]["published_s"] = published[name]
            report[name]["error"] = round(found.step_s / published[name] - 1, 4)
    return report


def as_table(report: dict[str, Any]) -> str:
    lines = [
        f"{'mode':<14}{'step':>10}{'published':>12}{'error':>9}{'speed-up':>10}{'over limit':>12}{'trainer waits':>15}",
    ]
    for name, row in report.items():
        published = f"{row['published_s']:.1f} s" if "published_s" in row else "-"
        error = f"{100 * row['error']:+.1f} %" if "error" in row else "-"
        limit = "-" if row["over_limit"] is None else f"{row['over_limit']:.3f}"
        lines.append(
            f"{name:<14}{row['step_s']:>8.1f} s{published:>12}{error:>9}{row['speedup']:>10.2f}{limit:>12}"
            f"{100 * row['trainer_wait_share']:>13.1f} %"
        )
    return "\n".join(lines)

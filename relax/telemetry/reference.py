"""Writes docs/metrics.md from the tables: `python -m relax.telemetry.reference > docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from relax.telemetry.live import LIVE
from relax.telemetry.metrics import METRICS, OWN_PREFIX, Metric

HEAD = f"""# Metrics

Generated from the tables in `relax/telemetry`: do not edit. How to look at them: [observability.md](observability.md).

## In the record of each step

The same name and the same value in `metrics.jsonl`, in `relax status --json`, in TensorBoard (as `relax/<name>`, in
float32) and in W&B. Prometheus has the last step's, with the label `run`. "Several" says how the values of several
steps or replicas become one. A metric whose name begins with `{OWN_PREFIX}` is a trainer's or loss's own.
"""

LIVE_HEAD = """
## Live state

At each tick of the controller, only in Prometheus. Every series carries `run` beside its labels. Totals count from
the start of the run, over restarts of a replica.
"""


def reference() -> str:
    head = ["| name | in Prometheus | unit | kind | several | meaning |", "|---|---|---|---|---|---|"]
    live_head = ["| in Prometheus | labels | unit | kind | several | meaning |", "|---|---|---|---|---|---|"]
    rows = [f"| `{metric.name}` | {_rest(metric)}" for metric in METRICS.values()]
    return "\n".join([HEAD, *head, *rows, LIVE_HEAD, *live_head, *_live(LIVE.values())]) + "\n"


def _live(metrics: Iterable[Metric]) -> Iterator[str]:
    for metric in metrics:
        name, rest = _rest(metric).split(" | ", 1)
        yield f"| {name} | {', '.join(metric.labels)} | {rest}"


def _rest(metric: Metric) -> str:
    meaning = metric.help.replace("|", "\\|")
    return f"`ray_{metric.prometheus}` | {metric.unit} | {metric.kind} | {metric.reduction} | {meaning} |"


if __name__ == "__main__":
    print(reference(), end="")

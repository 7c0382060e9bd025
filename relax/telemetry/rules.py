"""Prometheus recording and alert rules, made from the tables of metrics so that no name can be wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relax.telemetry.live import LIVE, ROLE_STATES, RUN_STATES
from relax.telemetry.metrics import METRICS

PREFIX = "relax:"
"""Begins the names of recorded series."""


def series(name: str, *matchers: str) -> str:
    """The selector of a metric of either table, by its name there. Raises `KeyError` for another name."""
    metric = METRICS[name] if name in METRICS else LIVE[name]
    return f"ray_{metric.prometheus}" + (f"{{{', '.join(matchers)}}}" if matchers else "")


def by(labels: str, expression: str, how: str = "max") -> str:
    """One series per value of `labels`: the controllers before and after a restart overlap for seconds."""
    return f"{how} by ({labels}) ({expression})"


def grown(name: str, window: str, *matchers: str) -> str:
    """How much a total grew."""
    return f"increase({series(name, *matchers)}[{window}])"


@dataclass(frozen=True, slots=True)
class Recording:
    name: str
    expression: str

    @property
    def record(self) -> str:
        return PREFIX + self.name


RECORDINGS = (
    Recording("steps_per_hour", by("run", f"rate({series('step')}[2m])") + " * 3600"),
    Recording("generated_tokens_per_second", by("run, role", series("generated_tokens_per_s"), "sum")),
    Recording("rows_per_second", by("run, role", f"rate({series('rows_done')}[1m])", "sum")),
    Recording("time_share", by("run, role, kind", series("time_share"), "avg")),
    Recording("roles_up_share", by("run", series("role_up"), "avg")),
    Recording("version_behind_max", by("run", series("version_behind", 'role="instance"'))),
    Recording(
        "drop_share", f"{by('run', grown('dropped', '10m'))} / clamp_min({by('run', grown('produced', '10m'))}, 1)"
    ),
    Recording("bus_fill", by("run", f"{series('bus_held_bytes')} / {series('bus_max_bytes')}")),
    Recording("swap_stall_share", by("run, instance", f"rate({series('swap_stall_s')}[1m])")),
)


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires when `value` is `condition` for `for_s`. A run that is well has a value too, which a test can see."""

    name: str
    value: str
    condition: str
    for_s: int
    severity: str
    summary: str

    @property
    def expression(self) -> str:
        return f"{self.value} {self.condition}"


_REPLICA = "run, role, instance"
_LIVING = f"<= {RUN_STATES['finishing']}"
_STATE = by("run", series("run_state"))


def _incidents(kind: str, window: str) -> str:
    return by(_REPLICA, grown("incidents", window, f'kind="{kind}"'))


ALERTS = (
    Alert("RelaxRunFailed", _STATE, f"== {RUN_STATES['failed']}", 0, "page", "Run {{ $labels.run }} has failed"),
    Alert(
        "RelaxControllerSilent",
        by("run", f"last_over_time({series('run_state')}[10m])"),
        f"{_LIVING} unless {_STATE}",
        30,
        "page",
        "The controller of run {{ $labels.run }} exports nothing any more, and the run had not ended",
    ),
    Alert(
        "RelaxNodeSilent",
        'up{job="relax"}',
        "== 0",
        30,
        "page",
        "The metrics endpoint {{ $labels.instance }} of run {{ $labels.run }} does not answer",
    ),
    Alert(
        "RelaxRunStalled",
        by("run", series("run_stalled")),
        "== 1",
        0,
        "page",
        "Nothing moves in run {{ $labels.run }}: `relax status` says who waits for whom",
    ),
    Alert(
        "RelaxRoleSilent",
        by(_REPLICA, series("heartbeat_age_s")),
        "> 30",
        0,
        "page",
        "{{ $labels.instance }} of run {{ $labels.run }} has sent no heartbeat for {{ $value }} s",
    ),
    Alert(
        "RelaxRoleFailed",
        by(_REPLICA, series("role_state")),
        f"== {ROLE_STATES['failed']}",
        0,
        "page",
        "{{ $labels.instance }} of run {{ $labels.run }} has failed: `relax logs` has its error",
    ),
    Alert(
        "RelaxRoleRestarted",
        by(_REPLICA, grown("restarts", "10m")),
        "> 0",
        0,
        "ticket",
        "{{ $labels.instance }} of run {{ $labels.run }} was replaced",
    ),
    Alert(
        "RelaxRoleHung",
        by("run", grown("incidents", "10m", 'kind=~"hung|silent|stuck_deploying|deploy_failed"')),
        "> 0",
        0,
        "ticket",
        "A role of run {{ $labels.run }} was silent, hung or did not come up: `relax incidents` names it",
    ),
    Alert(
        "RelaxStraggler",
        _incidents("straggler", "30m"),
        "> 0",
        0,
        "ticket",
        "A rollout instance of run {{ $labels.run }} stays far below its peers: `relax incidents` names it",
    ),
    Alert(
        "RelaxInstanceLagging",
        by(_REPLICA, series("version_behind", 'role="instance"')),
        "> 2",
        60,
        "ticket",
        "{{ $labels.instance }} of run {{ $labels.run }} is {{ $value }} versions behind",
    ),
    Alert(
        "RelaxAdoptionsFail",
        _incidents("adoption_failed", "5m"),
        "> 2",
        0,
        "page",
        "{{ $labels.instance }} of run {{ $labels.run }} cannot take the weights",
    ),
    Alert(
        "RelaxLogprobGapOverBand",
        f"{by('run', series('logprob_gap_mean'))} / {by('run', series('logprob_gap_band'))}",
        "> 1",
        0,
        "page",
        "Trainer and engines of run {{ $labels.run }} do not compute the same model",
    ),
    Alert(
        "RelaxUpdateSkipped",
        _incidents("update_skipped", "10m"),
        "> 0",
        0,
        "ticket",
        "An update of run {{ $labels.run }} was not finite and was left out",
    ),
    Alert(
        "RelaxCheckpointFailed",
        _incidents("checkpoint_failed", "30m"),
        "> 0",
        0,
        "page",
        "A checkpoint of run {{ $labels.run }} was not saved",
    ),
    Alert(
        "RelaxDropShareHigh",
        f"{PREFIX}drop_share",
        "> 0.2",
        120,
        "ticket",
        "Run {{ $labels.run }} drops or filters {{ $value | humanizePercentage }} of its samples",
    ),
    Alert(
        "RelaxRewardsFail",
        by("run", series("reward_failed_share")),
        "> 0.1",
        30,
        "page",
        "{{ $value | humanizePercentage }} of the last rewards of run {{ $labels.run }} failed",
    ),
    Alert(
        "RelaxBusFull",
        f"{PREFIX}bus_fill",
        "> 0.95",
        120,
        "ticket",
        "The bus of run {{ $labels.run }} is full: engines wait for the trainer",
    ),
)


def rules() -> dict[str, Any]:
    """The content of rules.yml."""
    return {
        "groups": [
            {
                "name": "relax-recorded",
                "rules": [{"record": item.record, "expr": item.expression} for item in RECORDINGS],
            },
            {
                "name": "relax-alerts",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expression,
                        "for": f"{alert.for_s}s",
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary},
                    }
                    for alert in ALERTS
                ],
            },
        ]
    }

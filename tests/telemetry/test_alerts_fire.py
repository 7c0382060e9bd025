"""Each alert is silent while a run is well and fires when it is not: the rules on made-up series, by promtool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from relax.telemetry.live import ROLE_STATES, RUN_STATES
from relax.telemetry.observability import deployed_files, write_files
from relax.telemetry.rules import ALERTS, series

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (package prometheus) is not installed"
)

RUN = 'run="tiny"'
REPLICA = (RUN, 'role="instance"', 'instance="rollout-0"')


def incidents(kind: str) -> str:
    return series("incidents", *REPLICA, f'kind="{kind}"')


RUNNING, FAILED = RUN_STATES["running"], RUN_STATES["failed"]
SERIES: dict[str, dict[str, tuple[str, str]]] = {
    "RelaxRunFailed": {series("run_state", RUN): (f"{RUNNING}x5", f"{FAILED}x180")},
    "RelaxControllerSilent": {series("run_state", RUN): (f"{RUNNING}x5", "_x180")},
    "RelaxNodeSilent": {f'up{{job="relax", {RUN}, instance="10.0.0.1:8080"}}': ("1x5", "0x180")},
    "RelaxRunStalled": {series("run_stalled", RUN): ("0x5", "1x180")},
    "RelaxRoleSilent": {series("heartbeat_age_s", *REPLICA): ("1x5", "40x180")},
    "RelaxRoleFailed": {
        series("role_state", *REPLICA): (f"{ROLE_STATES['active']}x5", f"{ROLE_STATES['failed']}x180"),
    },
    "RelaxRoleRestarted": {series("restarts", *REPLICA): ("0x5", "1x180")},
    "RelaxRoleHung": {incidents("hung"): ("0x5", "1x180")},
    "RelaxStraggler": {incidents("straggler"): ("0x5", "1x180")},
    "RelaxInstanceLagging": {series("version_behind", *REPLICA): ("1x5", "3x180")},
    "RelaxAdoptionsFail": {incidents("adoption_failed"): ("0x5", "5x180")},
    "RelaxLogprobGapOverBand": {
        series("logprob_gap_mean", RUN): ("0.00001x5", "0.01x180"),
        series("logprob_gap_band", RUN): ("0.0001x5", "0.0001x180"),
    },
    "RelaxUpdateSkipped": {incidents("update_skipped"): ("0x5", "1x180")},
    "RelaxCheckpointFailed": {incidents("checkpoint_failed"): ("0x5", "1x180")},
    "RelaxDropShareHigh": {
        series("dropped", RUN): ("0x5", "50+50x180"),
        series("produced", RUN): ("0+100x5", "600+100x180"),
    },
    "RelaxRewardsFail": {series("reward_failed_share", RUN): ("0x5", "0.5x180")},
    "RelaxBusFull": {
        series("bus_held_bytes", RUN): ("10x5", "99x180"),
        series("bus_max_bytes", RUN): ("100x5", "100x180"),
    },
}
"""Alert -> series -> its values every 10 s: of the first minute, and of what follows."""


def test_every_alert_is_silent_in_a_run_that_is_well_and_fires_in_one_that_is_not(tmp_path: Path) -> None:
    """behaviour: B16 B42"""
    assert SERIES.keys() == {alert.name for alert in ALERTS}
    write_files(tmp_path, deployed_files())
    tests = []
    for name, given in SERIES.items():
        firing = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
        late = "8m" if name == "RelaxControllerSilent" else "5m"  # an instant query still sees what is 5 minutes old
        tests.append(
            {
                "name": name,
                "interval": "10s",
                "input_series": [{"series": s, "values": f"{well} {ill}"} for s, (well, ill) in given.items()],
                "promql_expr_test": [
                    {"expr": firing, "eval_time": "50s", "exp_samples": []},
                    {"expr": firing, "eval_time": late, "exp_samples": [{"labels": "{}", "value": 1}]},
                ],
            }
        )
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "10s", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(document))
    tested = subprocess.run(
        ["promtool", "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr

"""Names of the Serve applications and of what belongs to one run."""

from __future__ import annotations

CONTROLLER = "controller"
DCS = "dcs"
ROLLOUT = "rollout"
REWARD = "reward"
REF = "ref"
ACTOR = "actor"

INSTANCE_PREFIX = "rollout-"
"""Application of one rollout instance: `rollout-<number>`."""


def instance_app(number: int) -> str:
    return f"{INSTANCE_PREFIX}{number}"


def namespace(run_name: str) -> str:
    """Ray namespace of the run's own detached actors."""
    return f"relax-{run_name}"

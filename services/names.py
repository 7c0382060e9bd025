"""Names of the Serve applications and of what belongs to one run."""

from __future__ import annotations

CONTROLLER = "controller"
DCS = "dcs"
ROLLOUT = "rollout"
REWARD = "reward"
REF = "ref"
TEACHER = "teacher"
ACTOR = "actor"

INSTANCE = "instance"
"""Role of a rollout instance."""

EVALUATOR = "evaluator"
"""Role of an instance that only evaluates."""

INSTANCE_PREFIX = "rollout-"
"""Application of one rollout instance: `rollout-<number>`, or `rollout-eval-<number>`."""


def instance_app(number: int) -> str:
    return f"{INSTANCE_PREFIX}{number}"


def evaluator_app(number: int) -> str:
    return f"{INSTANCE_PREFIX}eval-{number}"


def namespace(run_name: str) -> str:
    """Ray namespace of the run's own detached actors."""
    return f"relax-{run_name}"

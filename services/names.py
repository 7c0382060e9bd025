"""Names of the Serve applications and of what belongs to one run."""

from __future__ import annotations

CONTROLLER = "controller"
DCS = "dcs"
ROLLOUT = "rollout"
REWARD = "reward"
REF = "ref"
TEACHER = "teacher"
ACTOR = "actor"
BUS = "bus"

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


def instance_number(app: str) -> int | None:
    """Of a training instance's application; None for another one."""
    return _number_after(INSTANCE_PREFIX, app)


def evaluator_number(app: str) -> int | None:
    """Of an evaluating instance's application; None for another one."""
    return _number_after(evaluator_app(0)[:-1], app)


def _number_after(prefix: str, app: str) -> int | None:
    number = app.removeprefix(prefix)
    return int(number) if app.startswith(prefix) and number.isdigit() else None


def namespace(run_name: str) -> str:
    """Ray namespace of the run's own detached actors."""
    return f"relax-{run_name}"

"""What is done about a fault: a table by role and fault, and budgets. Pure; times are seconds of the caller's clock.

    fault ─▶ local answer of the table ─▶ its budget spent ─▶ global recovery ─▶ its budget spent ─▶ the run fails

Local: one replica or one instance; all others go on. Global: every role begins again from the newest state, Ray stays.
The n-th answer to faults of one replica within the window waits `backoff_s x 2^(n-2)`: the first comes at once.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax.config.recovery import RecoveryConfig


class Fault(enum.StrEnum):
    REPLICA_DEAD = "replica_dead"
    """Its process is gone."""
    SILENT = "silent"
    """No heartbeat past the deadline, and the process lives or cannot be seen: stopped, or cut off."""
    HUNG = "hung"
    """Heartbeats come, it waits for nobody, and no counter moves."""
    SLOW = "slow"
    """Its counters move, far more slowly than they did."""
    STRAGGLER = "straggler"
    """An instance that stays far below its peers."""
    ERROR = "error"
    """It told an exception of its own."""
    STUCK_DEPLOYING = "stuck_deploying"
    """Serve has not brought it up within its deadline."""
    DEPLOY_FAILED = "deploy_failed"
    """Serve gave it up."""
    ENGINE_WITHOUT_WEIGHTS = "engine_without_weights"
    """An instance that serves and cannot get a version."""
    BUS_LOST = "bus_lost"


class Action(enum.StrEnum):
    NONE = "none"
    """Only told."""
    WAIT = "wait"
    """Serve replaces the process by itself; past its deadline it is `stuck_deploying`."""
    RESTART_REPLICA = "restart_replica"
    """Kill the process, so that Serve replaces it."""
    REDEPLOY = "redeploy"
    """Give Serve a changed application, which makes it try anew."""
    REPLACE_INSTANCE = "replace_instance"
    """The manager takes the instance away and makes another."""
    RENEW_BUS = "renew_bus"
    GLOBAL_RECOVERY = "global_recovery"
    FAIL_RUN = "fail_run"


ROLES = ("actor", "ref", "teacher", "rollout", "reward", "dcs", "instance", "evaluator", "bus")
_F, _A = Fault, Action

_ANY: Mapping[Fault, Action] = {
    _F.REPLICA_DEAD: _A.WAIT,
    _F.SILENT: _A.RESTART_REPLICA,
    _F.HUNG: _A.RESTART_REPLICA,
    _F.SLOW: _A.NONE,
    _F.STRAGGLER: _A.NONE,
    _F.ERROR: _A.RESTART_REPLICA,
    _F.STUCK_DEPLOYING: _A.REDEPLOY,
    _F.DEPLOY_FAILED: _A.REDEPLOY,
    _F.ENGINE_WITHOUT_WEIGHTS: _A.RESTART_REPLICA,
    _F.BUS_LOST: _A.RENEW_BUS,
}
_INSTANCE: Mapping[Fault, Action] = {
    **_ANY,
    _F.STRAGGLER: _A.REPLACE_INSTANCE,
    _F.STUCK_DEPLOYING: _A.REPLACE_INSTANCE,
    _F.DEPLOY_FAILED: _A.REPLACE_INSTANCE,
    _F.ENGINE_WITHOUT_WEIGHTS: _A.REPLACE_INSTANCE,
}
_BUS: Mapping[Fault, Action] = {fault: _A.RENEW_BUS for fault in Fault}
TABLE: Mapping[str, Mapping[Fault, Action]] = {
    **{role: _ANY for role in ROLES},
    "instance": _INSTANCE,
    "evaluator": _INSTANCE,
    "bus": _BUS,
}
"""The local answer. A lost bus alone is renewed: its users find it by name, and stay."""

RUN = "run"
"""Whose budget a global recovery is of."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One answer that was given, and whose budget it took from: a replica's, or the run's (`RUN`)."""

    budget: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """`target`: whom it is done to. `not_before_s`: the end of the back-off. `budget`: whose it takes from, if any."""

    action: Action
    target: str
    reason: str
    not_before_s: float
    budget: str = ""


def backoff(attempt: int, config: RecoveryConfig) -> float:
    """Seconds before the `attempt`-th answer within a window, from 1."""
    return 0.0 if attempt <= 1 else min(config.backoff_max_s, config.backoff_s * 2.0 ** (attempt - 2))


def decide(
    role: str,
    target: str,
    fault: Fault,
    attempts: Sequence[Attempt],
    now_s: float,
    config: RecoveryConfig,
    instances: int = 1,
) -> Decision:
    """The answer to a fault of `target`, a replica or an instance of `role`.

    `attempts`: those that took from a budget. `instances` share one budget of replacements, as large as they are many:
    a replacement has another name. An unknown role is answered as any other.
    """
    action = TABLE.get(role, _ANY)[fault]
    if fault is Fault.STRAGGLER and not config.replace_stragglers:
        action = Action.NONE
    if action is Action.NONE:
        return Decision(action, target, f"{fault} is only reported", now_s)
    budget, limit = target, config.budget
    if action is Action.RENEW_BUS:
        limit = config.bus_budget
    elif action is Action.REPLACE_INSTANCE:
        budget, limit = f"replacements of {role}s", config.budget * max(1, instances)
    made = _within(attempts, budget, now_s, config.window_s)
    if made < limit:
        number = made + 1
        reason = f"{fault} of {target}: recovery {number} of {limit} within {config.window_s:g} s"
        return Decision(action, target, reason, now_s + backoff(number, config), budget)
    spent = f"{fault} of {target} after {made} local recoveries within {config.window_s:g} s"
    if role == "evaluator" or fault is Fault.STRAGGLER:  # training does not hang on it
        return Decision(Action.NONE, target, f"{spent}: given up", now_s)
    return _global(spent, attempts, now_s, config)


def _global(why: str, attempts: Sequence[Attempt], now_s: float, config: RecoveryConfig) -> Decision:
    made = _within(attempts, RUN, now_s, config.window_s)
    if made >= config.global_budget:
        reason = f"{why}, and {made} global recoveries within {config.window_s:g} s did not help"
        return Decision(Action.FAIL_RUN, RUN, reason, now_s)
    return Decision(Action.GLOBAL_RECOVERY, RUN, why, now_s + backoff(made + 1, config), RUN)


def _within(attempts: Sequence[Attempt], budget: str, now_s: float, window_s: float) -> int:
    return sum(1 for attempt in attempts if attempt.budget == budget and now_s - attempt.at_s < window_s)

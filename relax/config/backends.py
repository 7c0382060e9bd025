"""Which engine and training backends go together, and with which run."""

from __future__ import annotations

from relax.config.actor import ActorConfig
from relax.config.roles import RolloutConfig
from relax.config.run import RunConfig


def backend_problems(run: RunConfig, rollout: RolloutConfig, actor: ActorConfig) -> list[str]:
    """Simulated engines and a simulated trainer go together: real ones would compute with made-up numbers."""
    problems = []
    if rollout.engine.backend not in ("embedded", "simulated"):
        problems.append(f"rollout.engine.backend: unknown backend '{rollout.engine.backend}': embedded or simulated")
    simulated = [rollout.engine.backend == "simulated", actor.backend == "simulated"]
    if not any(simulated):
        return problems
    if not all(simulated):
        problems.append("rollout.engine.backend and actor.backend must both be 'simulated', or neither")
    profile = run.simulation
    if profile is None:
        return [*problems, "the backends 'simulated' need run.simulation: the time model of the cluster"]
    if rollout.instances != profile.rollout_gpus or rollout.engine.slots != profile.engine.slots:
        problems.append(
            f"rollout.instances {rollout.instances} and rollout.engine.slots {rollout.engine.slots} must be the "
            f"simulated cluster's: run.simulation.rollout_gpus {profile.rollout_gpus} and "
            f"run.simulation.engine.slots {profile.engine.slots}"
        )
    if run.use_ref or actor.critic is not None or actor.trainer is not None or actor.export:
        problems.append(
            "actor.backend 'simulated' goes without run.use_ref, actor.critic, actor.trainer and actor.export"
        )
    return problems

"""What a run file holds: the roles, the arguments of each application, the validated whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from relax.config.actor import ActorConfig
from relax.config.base import StrictModel
from relax.config.roles import ControllerConfig, DcsConfig, RefConfig, RewardConfig, RolloutConfig
from relax.config.run import RunConfig


class ControllerArgs(StrictModel):
    """Arguments of the controller application."""

    run: RunConfig
    """Shared facts."""
    controller: ControllerConfig = ControllerConfig()
    """Own section."""


class DcsArgs(StrictModel):
    """Arguments of the checkpoint service application."""

    run: RunConfig
    """Shared facts."""
    dcs: DcsConfig = DcsConfig()
    """Own section."""


class RolloutArgs(StrictModel):
    """Arguments of the rollout manager application."""

    run: RunConfig
    """Shared facts."""
    rollout: RolloutConfig
    """Own section."""


class RewardArgs(StrictModel):
    """Arguments of the reward application."""

    run: RunConfig
    """Shared facts."""
    reward: RewardConfig
    """Own section."""


class RefArgs(StrictModel):
    """Arguments of the reference application."""

    run: RunConfig
    """Shared facts."""
    ref: RefConfig = RefConfig()
    """Own section."""


class ActorArgs(StrictModel):
    """Arguments of the actor application."""

    run: RunConfig
    """Shared facts."""
    actor: ActorConfig = ActorConfig()
    """Own section."""


@dataclass(frozen=True, slots=True)
class Role:
    name: str
    import_path: str
    deployment: str
    args: type[StrictModel]


ROLES: Mapping[str, Role] = {
    role.name: role
    for role in (
        Role("controller", "services.controller.app:build", "Controller", ControllerArgs),
        Role("dcs", "services.dcs.app:build", "Dcs", DcsArgs),
        Role("rollout", "services.rollout.app:build", "RolloutManager", RolloutArgs),
        Role("reward", "services.reward.app:build", "Reward", RewardArgs),
        Role("ref", "services.ref.app:build", "Ref", RefArgs),
        Role("actor", "services.actor.app:build", "Actor", ActorArgs),
    )
}

TEACHER_PREFIX = "teacher-"
"""Deployments of the application `ref` beside Ref itself: one per teacher."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """A validated file: `serve` is what Serve gets, the others are its typed sections."""

    serve: dict[str, Any]
    run: RunConfig
    controller: ControllerConfig
    dcs: DcsConfig
    rollout: RolloutConfig
    reward: RewardConfig | None
    ref: RefConfig | None
    actor: ActorConfig

    def resolved(self) -> dict[str, Any]:
        """Every value, defaults included, as JSON."""
        sections: dict[str, BaseModel | None] = {
            "run": self.run,
            "controller": self.controller,
            "dcs": self.dcs,
            "rollout": self.rollout,
            "reward": self.reward,
            "ref": self.ref,
            "actor": self.actor,
        }
        return {name: model.model_dump(mode="json") for name, model in sections.items() if model is not None}

"""Builder of the `rollout` application."""

from __future__ import annotations

from ray.serve import Application

from relax.config.file import RolloutArgs
from services.rollout.manager import RolloutManager


def build(args: RolloutArgs) -> Application:
    return RolloutManager.bind(args)  # type: ignore[attr-defined,no-any-return]

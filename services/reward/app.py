"""Builder of the `reward` application."""

from __future__ import annotations

from ray.serve import Application

from relax.config.file import RewardArgs
from services.reward.deployment import Reward


def build(args: RewardArgs) -> Application:
    return Reward.bind(args)  # type: ignore[attr-defined,no-any-return]

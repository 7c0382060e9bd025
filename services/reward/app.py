"""Builder of the `reward` application. Serve reads the annotation at run time to validate `args`."""

from ray.serve import Application

from relax.config.sections import RewardArgs
from services.reward.deployment import Reward


def build(args: RewardArgs) -> Application:
    return Reward.bind(args)  # type: ignore[attr-defined]

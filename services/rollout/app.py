"""Builder of the `rollout` application. Serve reads the annotation at run time to validate `args`."""

from ray.serve import Application

from relax.config.sections import RolloutArgs
from services.rollout.manager import RolloutManager


def build(args: RolloutArgs) -> Application:
    return RolloutManager.bind(args)  # type: ignore[attr-defined]

"""Builder of the `actor` application. Serve reads the annotation at run time to validate `args`."""

from ray.serve import Application

from relax.config.sections import ActorArgs
from services.actor.deployment import Actor


def build(args: ActorArgs) -> Application:
    return Actor.bind(args)  # type: ignore[attr-defined]

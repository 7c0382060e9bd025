"""Builder of the `dcs` application. Serve reads the annotation at run time to validate `args`."""

from ray.serve import Application

from relax.config.sections import DcsArgs
from services.dcs.deployment import Dcs


def build(args: DcsArgs) -> Application:
    return Dcs.bind(args)  # type: ignore[attr-defined]

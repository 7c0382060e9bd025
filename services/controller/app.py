"""Builder of the `controller` application. Serve reads the annotation at run time to validate `args`."""

from ray.serve import Application

from relax.config.sections import ControllerArgs
from services.controller.deployment import Controller


def build(args: ControllerArgs) -> Application:
    return Controller.bind(args)  # type: ignore[attr-defined]

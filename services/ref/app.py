"""Builder of the `ref` application. Serve reads the annotation at run time to validate `args`."""

from ray.serve import Application

from relax.config.file import RefArgs
from services.ref.deployment import Ref


def build(args: RefArgs) -> Application:
    return Ref.bind(args)  # type: ignore[attr-defined]

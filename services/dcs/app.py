"""Builder of the `dcs` application."""

from __future__ import annotations

from ray.serve import Application

from relax.config.file import DcsArgs
from services.dcs.deployment import Dcs


def build(args: DcsArgs) -> Application:
    return Dcs.bind(args)  # type: ignore[attr-defined,no-any-return]

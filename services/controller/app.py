"""Builder of the `controller` application."""

from __future__ import annotations

from ray.serve import Application

from relax.config.file import ControllerArgs
from services.controller.deployment import Controller


def build(args: ControllerArgs) -> Application:
    return Controller.bind(args)  # type: ignore[attr-defined,no-any-return]

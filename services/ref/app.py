"""Builder of the `ref` application."""

from __future__ import annotations

from ray.serve import Application

from relax.config.file import RefArgs
from services.ref.deployment import Ref


def build(args: RefArgs) -> Application:
    return Ref.bind(args)  # type: ignore[attr-defined,no-any-return]

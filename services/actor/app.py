"""Builder of the `actor` application."""

from __future__ import annotations

from ray.serve import Application

from relax.config.file import ActorArgs
from services.actor.deployment import Actor


def build(args: ActorArgs) -> Application:
    return Actor.bind(args)  # type: ignore[attr-defined,no-any-return]

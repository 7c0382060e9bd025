"""Finding the rollout worker's class and checking its interface before anything starts."""

from __future__ import annotations

import inspect
from pathlib import Path

from relax.plugins import PluginError, load_class, load_function, origin
from relax.rollout.base import RolloutWorker
from relax.rollout.single_turn import SingleTurnWorker

__all__ = ["BUILT_IN", "load_class", "load_function", "load_worker"]

BUILT_IN: dict[str, type[RolloutWorker]] = {"single_turn": SingleTurnWorker}
"""Workers that a configuration names without a path."""


def load_worker(spec: str, base_folder: Path | None) -> type[RolloutWorker]:
    """The worker class: built in by name, or one's own by `package.module:Class` or `path/to/file.py:Class`.

    Raises `PluginError` that names class, file and what is missing, unless the class can be built as
    `Worker(context)` and has `async def step(self, item)`.
    """
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    if ":" not in spec:
        raise PluginError(
            f"unknown worker '{spec}': built in are {', '.join(BUILT_IN)}; "
            "an own one is given as package.module:Class or path/to/file.py:Class"
        )
    worker = load_class(spec, base_folder)
    complaint = _complaint(worker)
    if complaint:
        raise PluginError(f"worker class {worker.__name__} in {origin(worker)} {complaint}")
    return worker


def _complaint(worker: type) -> str | None:
    step = inspect.getattr_static(worker, "step", None)
    if step is None:
        return "has no `step`: it needs `async def step(self, item: DataItem) -> Trajectory`"
    if not inspect.iscoroutinefunction(step):
        return "has a `step` that is not `async def step(self, item: DataItem) -> Trajectory`"
    if not _takes(step, "self", "item"):
        return f"has `step{inspect.signature(step)}`: it must take exactly one item besides self"
    if not _takes(worker, "context"):
        return f"is built as {worker.__name__}{inspect.signature(worker)}: it must take exactly one WorkerContext"
    return None


def _takes(function: object, *arguments: str) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True

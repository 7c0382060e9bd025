"""What a user writes to make samples: one class with one method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from relax.types import DataItem, Trajectory

if TYPE_CHECKING:
    from relax.data.tokenizer import Tokenizer
    from relax.engines.base import EngineClient


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker is built with. `deadline_s` bounds one call to the engine."""

    engine: EngineClient
    tokenizer: Tokenizer
    max_tokens: int
    deadline_s: float


class RolloutWorker(Protocol):
    """Built once per instance as `Worker(context)`; `step` runs concurrently for many items."""

    def __init__(self, context: WorkerContext) -> None: ...

    async def step(self, item: DataItem) -> Trajectory | list[Trajectory]:
        """Produce one sample: a trajectory, or the segments of one that had to be split (`Conversation`).

        An exception is a failed attempt: retried, then a counted tombstone (B39).
        """
        ...

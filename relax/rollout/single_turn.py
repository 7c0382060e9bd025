"""The built-in worker: one prompt, one answer."""

from __future__ import annotations

from relax.rollout.base import WorkerContext
from relax.rollout.conversation import Conversation
from relax.types import DataItem, Trajectory


class SingleTurnWorker:
    """Asks the engine once per item."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    async def step(self, item: DataItem) -> Trajectory:
        """One sample: the rendered prompt and the engine's tokens behind it. Raises what `Conversation.ask` does."""
        conversation = Conversation(self._context, item)
        await conversation.ask()
        [trajectory] = conversation.trajectories()
        return trajectory

"""Contract of the reward application: it serves the bus, and scores single requests for tools."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class ScoreRequest(BaseModel):
    """One response to score outside a run's data flow."""

    response: str
    label: Any = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class ScoreReply(BaseModel):
    reward: float | None
    accuracy: float | None
    parts: dict[str, float]
    state: str
    error: str | None

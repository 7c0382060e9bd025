"""A reward that no built-in gives: how much of the response is the digit 9."""

from __future__ import annotations

from typing import Any


def share_of_nines(response: str, label: Any, metadata: dict[str, Any]) -> float:
    return response.count("9") / max(3, len(response))

"""`answer` is right or wrong; the other two give part of the way there."""

from __future__ import annotations

from typing import Any


def answer(response: str, label: dict[str, str], metadata: dict[str, Any]) -> float:
    return float(response == label["answer"])


def answer_overlap(response: str, label: dict[str, str], metadata: dict[str, Any]) -> float:
    return overlap(response, label["answer"])


def call_overlap(response: str, label: dict[str, str], metadata: dict[str, Any]) -> float:
    return overlap(metadata["trajectory"]["call"], label["call"])


def overlap(text: str, wanted: str) -> float:
    right = sum(a == b for a, b in zip(text, wanted, strict=False))
    return right / max(len(text), len(wanted))

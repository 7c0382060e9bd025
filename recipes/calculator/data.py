"""Sums of two digits, with the call of the tool that gives the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Sums:
    """All pairs of digits, each once: one in eight is held out for evaluation."""

    def __init__(self, params: Mapping[str, Any], seed: int, held_out: bool) -> None:
        largest = int(params.get("largest", 9))
        pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
        self.pairs = [(a, b) for a, b in pairs if ((3 * a + b) % 8 == 0) == held_out]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        a, b = self.pairs[index]
        return {"prompt": f"{a}+{b}>", "label": {"call": f"{a}+{b}=", "answer": f"{a + b:02d}"}}

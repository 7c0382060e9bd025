"""What the end-to-end tests share."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax.cli.run import Outcome

ROOT = Path(__file__).parents[2]
TINY = ROOT / "deploy" / "tiny_cpu.yaml"
# A task that is learnt in a few dozen steps: repeat one digit.
EASY = ["rollout.data.task=copy", "rollout.data.params={length: 1}", "run.groups_per_step=8"]


@dataclass
class Finished:
    """A run that has ended, and its folder."""

    outcome: Outcome
    folder: Path
    seen: list[dict[str, Any]] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return loaded

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


Runner = Callable[..., Finished]


def kill_once(condition: Callable[[dict[str, Any]], bool], role: str) -> Callable[[dict[str, Any]], None]:
    """SIGKILL the process of a role, once, when the condition holds."""
    done: list[int] = []

    def during(status: dict[str, Any]) -> None:
        if done or not condition(status):
            return
        for view in status["roles"]:
            if view["instance"] == role:
                os.kill(view["pid"], signal.SIGKILL)
                done.append(view["pid"])

    return during

"""The table of published versions: a line each in the run folder, which outlives the weights and this process.

A version is given once in a run, however often it is taken up again: the next one is always above the last line.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from relax.types import PolicyVersion

FILE = "versions.jsonl"


@dataclass(frozen=True, slots=True)
class VersionLine:
    """`step`: the training step whose weights it has; it goes back where the trainer did."""

    version: PolicyVersion
    step: int
    digest: str


class VersionTable:
    """One writer. A line that a crash tore is passed over, and the next begins on a line of its own."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self.lines = read_versions(self._path)
        if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):
            with self._path.open("ab") as file:
                file.write(b"\n")

    @property
    def newest(self) -> PolicyVersion:
        """The highest version that was ever published; -1 before the first."""
        return max((line.version for line in self.lines), default=PolicyVersion(-1))

    def add(self, line: VersionLine) -> None:
        """Durable when this returns."""
        with self._path.open("ab") as file:
            file.write(json.dumps(asdict(line)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)


def read_versions(path: Path) -> list[VersionLine]:
    """Whole lines, oldest first; none where there is no file."""
    lines = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            lines.append(VersionLine(**json.loads(text)))
        except (ValueError, TypeError):
            continue
    return lines

"""The table of published versions: a line each in the run folder, which outlives the weights and this process.

A version is given once in a run, however often it is taken up again: the next one is above all lines. Only the same
weights may come again under their number, after the memory that held them is gone.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from relax.types import PolicyVersion
from relax.weights.manifest import CorruptWeights

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
    def newest(self) -> VersionLine | None:
        """The highest version that was ever published; None before the first."""
        return max(self.lines, key=lambda line: line.version, default=None)

    def add(self, line: VersionLine) -> None:
        """Durable when this returns. A version that comes again has to be the same: raises `CorruptWeights`."""
        for known in self.lines:
            if known.version == line.version and known != line:
                raise CorruptWeights(f"version {line.version} was published before, with other weights")
            if known == line:
                return
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

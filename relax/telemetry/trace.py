"""Spans: what a role did to which samples, and when. Recorded in memory, written now and then, merged later.

One span covers all samples that went through together (a lease, a step), so that its cost does not grow with them.
Times are wall-clock seconds, so that the spans of several processes can be put side by side.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relax.telemetry.run_folder import RunFolder, RunFolderError, read_lines
from relax.types import Json

TRACES = "traces"
"""Folder of the spans in a run folder: one file per process that recorded any."""
MAX_PENDING = 20_000
"""Spans kept in memory between two writes; more are dropped and counted."""

LEASE, GENERATE, REWARD, REF, TRAIN, PUBLISH = "lease", "generate", "reward", "ref", "train", "publish"
"""Names of the spans that a sample goes through; a teacher's is its task, `teacher:<name>`."""


@dataclass(frozen=True, slots=True)
class Span:
    """`samples`: group id -> members; without any it is about the role. `facts`: version, step, tokens and so on."""

    name: str
    begin_s: float
    end_s: float
    samples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    facts: Mapping[str, Json] = field(default_factory=dict)
    role: str = ""
    instance: str = ""

    def sample_ids(self) -> Iterator[str]:
        return (f"{group}/{k}" for group, members in self.samples.items() for k in members)


class Tracer:
    """Collects the spans of one process. Thread-safe.

    `share`: of the groups whose samples are traced, chosen by their id alone, so that every role traces the same.
    """

    def __init__(self, share: float, role: str, instance: str) -> None:
        self.role, self.instance = role, instance
        self.dropped = 0
        self._limit = round(share * (1 << 32))
        self._lock = threading.Lock()
        self._pending: list[Span] = []
        self._untold = 0

    def traced(self, group_id: str) -> bool:
        return zlib.crc32(group_id.encode()) < self._limit

    def add(
        self,
        name: str,
        begin_s: float,
        end_s: float,
        samples: Iterable[tuple[str, int]] | None = None,
        **facts: Json,
    ) -> None:
        """`samples`: (group id, member) pairs, None for a span about the role itself. Without a traced sample among
        them nothing is kept."""
        members: dict[str, list[int]] = defaultdict(list)
        for group_id, k in samples or ():
            if group_id in members or self.traced(group_id):
                members[group_id].append(k)
        if not self._limit or (samples is not None and not members):
            return
        # Segments of one sample are one sample.
        kept = {group_id: tuple(dict.fromkeys(ks)) for group_id, ks in members.items()}
        span = Span(name, begin_s, end_s, kept, facts, self.role, self.instance)
        with self._lock:
            if len(self._pending) < MAX_PENDING:
                self._pending.append(span)
            else:
                self._drop(1)

    @property
    def pending(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._pending or self._untold)

    def write(self, folder: RunFolder) -> None:
        """Append what was recorded to this process's file. What the disk refuses is dropped and counted.

        Raises:
            RunFolderError: the disk refused.
        """
        with self._lock:
            spans, self._pending = self._pending, []
            untold, self._untold = self._untold, 0
        if not spans and not untold:
            return
        lines = [_line(span) for span in spans] + ([{"dropped": untold}] if untold else [])
        try:
            folder.append_lines(f"{TRACES}/{self.instance}.jsonl", lines)
        except RunFolderError:
            with self._lock:
                self._untold += untold
                self._drop(len(spans))
            raise

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._untold += count


def _line(span: Span) -> dict[str, Json]:
    line: dict[str, Json] = {
        "name": span.name,
        "begin_s": round(span.begin_s, 6),
        "end_s": round(span.end_s, 6),
        "role": span.role,
    }
    if span.samples:
        line["samples"] = span.samples
    if span.facts:
        line["facts"] = span.facts
    return line


def read_spans(run_dir: Path) -> tuple[list[Span], int]:
    """All spans of a run in the order of their begin, and how many were dropped.

    Raises:
        RunFolderError: a file cannot be read, or a line that is not the last is no span.
    """
    spans: list[Span] = []
    dropped = 0
    for path in sorted((run_dir / TRACES).glob("*.jsonl")):
        for number, line in enumerate(read_lines(path), 1):
            if "dropped" in line:
                dropped += int(line["dropped"])
                continue
            try:
                spans.append(_span(line, path.stem))
            except (KeyError, TypeError, AttributeError) as error:
                text = json.dumps(line)[:80]
                raise RunFolderError(f"{path}, line {number} is no span ({type(error).__name__} in {text})") from error
    return sorted(spans, key=lambda span: (span.begin_s, span.end_s)), dropped


def _span(line: Mapping[str, Json], instance: str) -> Span:
    samples = {group: tuple(members) for group, members in line.get("samples", {}).items()}
    return Span(line["name"], line["begin_s"], line["end_s"], samples, line.get("facts", {}), line["role"], instance)


def by_sample(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Sample id -> the spans that it went through, in their order."""
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        for sample_id in span.sample_ids():
            found[sample_id].append(span)
    return dict(found)

"""The files of one run: run.json, config.json, metrics.jsonl, samples.jsonl, summary.json, report.html."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

from relax.types import Json, RelaxError


class RunFolderError(RelaxError, OSError):
    """A file of the run folder cannot be written or read; the message names it and the system's reason."""


class RunFolder:
    """Appends are whole lines, in the order of the calls, from any thread. One process writes.

    A crash can tear the last line of a .jsonl file: readers leave it out, and the next append removes it.
    """

    def __init__(self, path: Path) -> None:
        """Creates the folder if it is missing.

        Raises:
            RunFolderError: it cannot be created.
        """
        self.path = path
        self._lock = threading.Lock()
        self._mended: set[Path] = set()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _failed("create", path, error) from error

    @property
    def place_path(self) -> Path:
        return self.path / "run.json"

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def evals_path(self) -> Path:
        return self.path / "evals.jsonl"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    @property
    def targets_path(self) -> Path:
        """What Prometheus scrapes, in its file service discovery format."""
        return self.path / "prometheus_targets.json"

    def read_place(self) -> dict[str, Any]:
        """Where the run can be reached: `url` of its API, `logs` of its services, `ray_folder` of a private Ray,
        `metrics`: host:port of each node's Prometheus endpoint."""
        if not self.place_path.exists():
            return {}
        place: dict[str, Any] = json.loads(self.place_path.read_text())
        return place

    def write_place(self, **facts: Json) -> None:
        """Add to what `read_place` returns."""
        self.write_text(self.place_path, json.dumps({**self.read_place(), **facts}, indent=2) + "\n")

    def write_targets(self, targets: Sequence[str], run: str) -> None:
        """`targets`: host:port of each node's Prometheus endpoint; every series scraped there gets the label `run`."""
        groups = [{"targets": list(targets), "labels": {"run": run}}]
        self.write_text(self.targets_path, json.dumps(groups, indent=2) + "\n")
        self.write_place(metrics=list(targets))

    def write_config(self, config: Mapping[str, Json]) -> None:
        """The resolved configuration, defaults included."""
        self.write_text(self.config_path, json.dumps(config, indent=2) + "\n")

    def append_metrics(self, record: Mapping[str, float]) -> None:
        """One line for one step."""
        self._append(self.metrics_path, [record])

    def append_samples(self, samples: Iterable[Any] | bytes) -> None:
        """One line for each generation with its reward: mappings, dataclass instances, or lines ready made."""
        self._append(self.samples_path, samples)

    def append_eval(self, record: Mapping[str, Json]) -> None:
        """One line for each held-out evaluation."""
        self._append(self.evals_path, [record])

    def append_lines(self, name: str, records: Iterable[Any]) -> None:
        """Lines of another .jsonl file, which may lie in a folder of its own."""
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _failed("create", path.parent, error) from error
        self._append(path, records)

    def write_summary(self, summary: Mapping[str, Json]) -> None:
        self.write_text(self.summary_path, json.dumps(summary, indent=2) + "\n")

    def write_text(self, path: Path, text: str) -> None:
        """Replace a file in one step: a reader sees the old text or the new one.

        Raises:
            RunFolderError: the disk refuses; the old file is as it was.
        """
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        with self._lock:
            try:
                with open(staged, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(staged, path)
            except OSError as error:
                staged.unlink(missing_ok=True)
                raise _failed("write", path, error) from error

    def read_config(self) -> dict[str, Json]:
        """Raises `RunFolderError` where none was written."""
        return self._read_object(self.config_path)

    def read_metrics(self) -> list[dict[str, float]]:
        """All steps, in order; none where nothing was written. What was trained again after a rollback is there once:
        a later record takes the place of all earlier ones of its step and of the steps after it."""
        records: list[dict[str, float]] = []
        for record in read_lines(self.metrics_path):
            while records and records[-1]["step"] >= record["step"]:
                records.pop()
            records.append(record)
        return records

    def cut_metrics(self, step: int) -> int:
        """Leave the records of the steps up to this one; the others move to `metrics_superseded.jsonl`. Returns the
        newest step that was taken out, 0 for none. Before anybody appends."""
        records = self.read_metrics()
        later = [record for record in records if record["step"] > step]
        if later:
            self.append_lines("metrics_superseded.jsonl", later)
            kept = json_lines(record for record in records if record["step"] <= step)
            self.write_text(self.metrics_path, kept.decode())
        return int(later[-1]["step"]) if later else 0

    def read_evals(self) -> list[dict[str, Json]]:
        """All held-out evaluations; none where nothing was written."""
        return list(read_lines(self.evals_path))

    def read_samples(self, first: int | None = None, last: int = 0) -> list[dict[str, Json]]:
        """All generations, or only the `first` and the `last` ones of a long file."""
        lines = read_lines(self.samples_path)
        if first is None:
            return list(lines)
        head = list(islice(lines, first))
        return head + list(deque(lines, maxlen=last))

    def read_summary(self) -> dict[str, Json]:
        """Raises `RunFolderError` where none was written."""
        return self._read_object(self.summary_path)

    def _append(self, path: Path, records: Iterable[Any] | bytes) -> None:
        lines = records if isinstance(records, bytes) else json_lines(records)
        with self._lock:
            try:
                # Unbuffered: a buffer would be written once more, on closing, after a failed write.
                with open(path, "ab", buffering=0) as file:
                    if path not in self._mended:
                        file.truncate(_whole_lines_bytes(path))
                        self._mended.add(path)
                    begin = file.seek(0, os.SEEK_END)
                    try:
                        _write_all(file, lines)
                    except OSError:
                        file.truncate(begin)  # half a line must not spoil the next one
                        raise
            except OSError as error:
                raise _failed("append to", path, error) from error

    def _read_object(self, path: Path) -> dict[str, Json]:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise _failed("read", path, error) from error
        except ValueError as error:
            raise RunFolderError(f"{path} is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise RunFolderError(f"{path} holds no JSON object")
        return value


def json_lines(records: Iterable[Any]) -> bytes:
    """Lines of a .jsonl file: of mappings or dataclass instances."""
    return "".join(json.dumps(_plain(record)) + "\n" for record in records).encode()


def read_lines(path: Path) -> Iterator[dict[str, Json]]:
    """The objects of a .jsonl file; none where it is missing. A last line that a crash tore is left out.

    Raises:
        RunFolderError: the file cannot be read, or another line is no JSON.
    """
    if not path.exists():
        return
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    return
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise RunFolderError(f"{path}, line {number} is no JSON: {error}") from error
    except OSError as error:
        raise error if isinstance(error, RunFolderError) else _failed("read", path, error) from error


def _plain(record: Any) -> Json:
    """Its fields as they are: `asdict` would copy each of them, deep down."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return record


def _write_all(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _whole_lines_bytes(path: Path) -> int:
    """Size up to the last line end."""
    with open(path, "rb") as file:
        position = file.seek(0, os.SEEK_END)
        while position > 0:
            begin = max(0, position - (1 << 16))
            file.seek(begin)
            found = file.read(position - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            position = begin
    return 0


def _failed(verb: str, path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(f"cannot {verb} {path}: {error.strerror or error}")

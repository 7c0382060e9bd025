"""One record reaches every sink with the same values; a tracker can neither hold up nor end the run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tracker_files import tensorboard_steps, wandb_steps

from relax.config.roles import ControllerConfig
from relax.telemetry.metrics import METRICS, Kind, validate
from relax.telemetry.run_folder import RunFolder
from relax.telemetry.sinks import MetricSinks, RunFolderSink, Tracker
from relax.telemetry.trackers import build_trackers

DEADLINE_S = 60.0


def record(step: int) -> dict[str, float]:
    """Every metric of the table, with values that no sink can confuse, and one of a user's own."""
    values = {
        name: (0.1 if metric.kind is Kind.SHARE else 7.3) + step / 7 / (1 + len(name))
        for name, metric in METRICS.items()
    }
    full = {**values, "step": float(step), "own_extra": -1.5 * step}
    validate(full)
    return full


class Collecting:
    def __init__(self) -> None:
        self.seen: list[Mapping[str, float]] = []
        self.closed = False

    def write(self, record: Mapping[str, float]) -> None:
        self.seen.append(record)

    def close(self) -> None:
        self.closed = True


class Failing(Collecting):
    """Cannot take the second record."""

    def write(self, record: Mapping[str, float]) -> None:
        if record["step"] == 2:
            raise OSError("no space left")
        super().write(record)


def test_file_tensorboard_and_wandb_hold_equal_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """behaviour: B42"""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_CACHE_DIR", raising=False)
    config = ControllerConfig(trackers=("tensorboard", "wandb"))
    sinks = MetricSinks([RunFolderSink(RunFolder(tmp_path))], build_trackers(config, "tiny", "id1", tmp_path))
    written = {step: record(step) for step in (1, 2, 3)}
    for line in written.values():
        sinks.write(line)
    sinks.close(DEADLINE_S)
    assert sinks.troubles() == {}
    assert {int(line["step"]): line for line in RunFolder(tmp_path).read_metrics()} == written
    assert wandb_steps(tmp_path / "wandb") == written
    assert (tmp_path / "wandb" / "cache").is_dir()
    rounded = {step: {name: float(np.float32(value)) for name, value in line.items()} for step, line in written.items()}
    assert tensorboard_steps(tmp_path / "tensorboard") == rounded


def test_an_error_of_a_tracker_costs_one_record_and_is_told() -> None:
    failing, good = Failing(), Collecting()
    sinks = MetricSinks([], [Tracker("failing", lambda: failing), Tracker("good", lambda: good)])
    for step in (1, 2, 3):
        sinks.write({"step": float(step)})
    sinks.close(DEADLINE_S)
    assert [line["step"] for line in failing.seen] == [1, 3] and failing.closed
    assert [line["step"] for line in good.seen] == [1, 2, 3] and good.closed
    assert sinks.troubles() == {"failing": "1 records or calls failed; the last: OSError: no space left"}


def test_a_tracker_that_cannot_be_made_is_tried_again_and_told() -> None:
    good, attempts = Collecting(), list[int]()

    def make() -> Collecting:
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("not reachable")
        return good

    sinks = MetricSinks([], [Tracker("late", make)])
    sinks.write({"step": 1.0})
    sinks.write({"step": 2.0})
    sinks.close(DEADLINE_S)
    assert [line["step"] for line in good.seen] == [2]
    assert "not reachable" in sinks.troubles()["late"]


def test_a_tracker_that_hangs_holds_up_neither_the_run_nor_its_end() -> None:
    release = threading.Event()

    class Hanging(Collecting):
        def write(self, record: Mapping[str, float]) -> None:
            release.wait(DEADLINE_S)

    tracker = Tracker("hanging", Hanging, backlog=2)
    sinks = MetricSinks([], [tracker])
    for step in range(1, 6):  # one is being written, two wait, the others are left out
        sinks.write({"step": float(step)})
    assert tracker.errors >= 2 and "2 records behind" in tracker.last_error
    sinks.close(0.1)
    assert "did not end within" in tracker.last_error
    sinks.write({"step": 6.0})
    assert "is closed: step 6" in tracker.last_error
    release.set()


def test_an_error_of_the_run_folder_is_the_run_s(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics_path.mkdir()
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        MetricSinks([RunFolderSink(folder)], []).write({"step": 1.0})

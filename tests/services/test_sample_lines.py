"""Samples as the reward role sends them to `samples.jsonl`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from relax.telemetry.run_folder import RunFolder
from services.controller.api import SampleRecord, sample_lines

SAMPLE = SampleRecord(
    row_id="toy:0:1/2/0",
    purpose="train",
    version=3,
    prompt='1 "+" 1\n=',
    response="zwei ≠ 3",
    label={"answer": 2},
    reward=0.5,
    accuracy=None,
    parts={"exact": 1e-7},
    reward_state="ok",
    finish_reason="stop",
)


def test_lines_hold_the_records_whatever_their_labels(tmp_path: Path) -> None:
    samples = [SAMPLE, replace(SAMPLE, row_id="toy:0:1/3/0", label=10**30)]
    folder = RunFolder(tmp_path)
    folder.append_samples(sample_lines(samples[:1]))
    folder.append_samples(sample_lines(samples))
    assert folder.read_samples() == [asdict(sample) for sample in (SAMPLE, *samples)]
    assert sample_lines([]) == b""

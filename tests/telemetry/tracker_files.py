"""Reads what the trackers wrote: step -> metric -> value."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from relax.telemetry.trackers import TAG_PREFIX

Steps = dict[int, dict[str, float]]
BLOCK, HEAD = 32768, 7


def tensorboard_steps(folder: Path) -> Steps:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    steps: Steps = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = float(tensor_util.make_ndarray(value.tensor).item())
                steps.setdefault(event.step, {})[value.tag.removeprefix(TAG_PREFIX)] = number
    return steps


def wandb_steps(folder: Path) -> Steps:
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("offline-run-*/*.wandb")
    steps: Steps = {}
    for data in _log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            values = {name: float(json.loads(text)) for name, text in items.items()}
            steps[int(values["_step"])] = {name: value for name, value in values.items() if not name.startswith("_")}
    return steps


def _log_records(data: bytes) -> Iterator[bytes]:
    """The file is a LevelDB log behind a head: blocks of chunks, each with checksum, length and kind."""
    position, record = HEAD, b""
    while position + HEAD <= len(data):
        if (left := BLOCK - position % BLOCK) < HEAD:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEAD])
        record += data[position + HEAD : position + HEAD + length]
        position += HEAD + length
        if kind in (1, 4):  # a whole record, or its last chunk
            yield record
            record = b""

"""The trainer's state in host memory: whole or not there, and cheap to take again."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from relax.checkpoint.manifest import TENSORS
from relax.checkpoint.snapshot import MANIFEST, copy_snapshot, newest_snapshot, read_snapshot
from relax.training.snapshot import SnapshotWriter
from relax.training.state import StateLayout, TrainerState, read_state, write_state
from relax.types import ModelError
from relax.weights import space
from relax.weights.space import NoSpace


def state(value: float, width: int = 3) -> TrainerState:
    tensors = {
        "weight": torch.full((2, width), value),
        "half": torch.full((3,), value, dtype=torch.bfloat16),
        "count": torch.tensor(value, dtype=torch.float32),
        "rng": torch.full((5,), int(value), dtype=torch.uint8),
    }
    return TrainerState(tensors, {"updates": int(value)})


def without_weight(whole: TrainerState) -> TrainerState:
    """Copying it fails in the middle."""
    return TrainerState({name: t for name, t in whole.tensors.items() if name != "weight"}, whole.facts)


def assert_same(one: TrainerState, other: TrainerState) -> None:
    assert one.facts == other.facts and one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype and torch.equal(tensor, other.tensors[name]), name


def test_a_state_comes_back_from_a_folder_and_another_program_can_read_it(tmp_path: Path) -> None:
    write_state(state(7), tmp_path)
    assert_same(read_state(tmp_path), state(7))
    assert load_file(tmp_path / TENSORS).keys() == state(7).tensors.keys()
    assert StateLayout.of(state(7)) == StateLayout.of(state(8))


def test_a_folder_without_a_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        read_state(tmp_path)


def test_the_newest_of_many_is_read_and_no_more_memory_is_taken(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path)
    for step in range(1, 10):
        writer.take(state(step), step, {"version": step + 1})
    newest = newest_snapshot(tmp_path)
    assert newest is not None and (newest.step, newest.meta) == (9, {"version": 10})
    assert_same(read_state(newest.folder), state(9))
    assert len(list(tmp_path.glob("buffer-*"))) == 3


def test_a_copy_that_was_cut_off_leaves_the_one_before(tmp_path: Path) -> None:
    """behaviour: B13"""
    writer = SnapshotWriter(tmp_path)
    taken = [writer.take(state(step), step, {}) for step in (1, 2, 3)]
    with pytest.raises(KeyError):
        writer.take(without_weight(state(4)), 4, {})
    assert newest_snapshot(tmp_path) == taken[2]
    assert_same(read_state(taken[2].folder), state(3))
    assert read_snapshot(taken[0].folder) is None, "half of it is overwritten"


def test_a_held_one_stays_while_others_are_taken_and_two_cannot_be_held(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path / "memory")
    held = writer.take(state(1), 1, {})
    writer.hold(held)
    for step in range(2, 8):
        newest = writer.take(state(step), step, {})
    with pytest.raises(ValueError, match="held"):
        writer.hold(newest)
    target = tmp_path / "saved"
    target.mkdir()
    copy_snapshot(held, target)
    assert_same(read_state(target), state(1))
    writer.release(held)
    writer.take(state(8), 8, {})
    assert not (held.folder / MANIFEST).exists() or newest_snapshot(tmp_path / "memory").step == 8  # type: ignore[union-attr]


def test_a_new_process_goes_on_from_what_a_killed_one_took_and_overwrites_the_oldest(tmp_path: Path) -> None:
    program = f"""
        import os, signal, torch
        from pathlib import Path
        from relax.training.snapshot import SnapshotWriter
        from relax.training.state import TrainerState
        writer = SnapshotWriter(Path({str(tmp_path)!r}))
        for step in (1, 2, 3, 4):
            writer.take(TrainerState({{"x": torch.full((4,), float(step))}}, {{}}), step, {{}})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=120, check=False)
    assert done.returncode == -9
    newest = newest_snapshot(tmp_path)
    assert newest is not None and newest.step == 4
    assert read_state(newest.folder).tensors["x"].tolist() == [4.0] * 4
    writer = SnapshotWriter(tmp_path)
    taken = writer.take(TrainerState({"x": torch.full((4,), 5.0)}, {}), 5, {})
    assert taken.serial == newest.serial + 1 and taken.folder != newest.folder
    assert newest_snapshot(tmp_path) == taken


def test_a_state_of_another_shape_does_not_pass_for_the_old_one(tmp_path: Path) -> None:
    old = SnapshotWriter(tmp_path).take(state(1), 1, {})
    writer = SnapshotWriter(tmp_path)
    writer.take(state(2, width=6), 2, {})
    newest = newest_snapshot(tmp_path)
    assert newest is not None
    assert_same(read_state(newest.folder), state(2, width=6))
    assert read_snapshot(old.folder) in (None, newest), "its file has another layout now"
    writer.clear()
    assert newest_snapshot(tmp_path) is None


def test_room_for_all_buffers_is_looked_for_before_the_first_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B47"""
    need = 3 * StateLayout.of(state(1)).n_bytes
    monkeypatch.setattr(space, "free_bytes", lambda folder: need + 99)
    writer = SnapshotWriter(tmp_path, reserve_bytes=100)
    with pytest.raises(NoSpace, match=r"snapshots of the actor's state .* training goes on without") as caught:
        writer.take(state(1), 1, {})
    assert caught.value.need_bytes == need and list(tmp_path.glob("buffer-*")) == []
    monkeypatch.setattr(space, "free_bytes", lambda folder: need + 100)
    writer.take(state(2), 2, {})
    monkeypatch.setattr(space, "free_bytes", lambda folder: 100)
    assert SnapshotWriter(tmp_path, reserve_bytes=100).take(state(3), 3, {}).step == 3, "the buffers are there already"

"""Checkpoints: visible when complete, good ones survive every failure."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from relax.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    CheckpointManifest,
    CheckpointSchemaError,
    CorruptCheckpoint,
)
from relax.checkpoint.store import CheckpointStore, reading
from relax.config.roles import RetentionConfig
from relax.weights import space
from relax.weights.space import NoSpace

META = {"frontier": ["toy:0:0"], "ledger": {"lineage": 0}}


def writer(text: str = "weights") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.bin").write_text(text * 100)
        (folder / "optim").mkdir()
        (folder / "optim" / "rank0.bin").write_text(text)

    return write


def newest_step(store: CheckpointStore) -> int | None:
    latest = store.latest()
    return None if latest is None else latest.step


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=RetentionConfig(newest=2))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=10).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


def test_a_checkpoint_gives_back_its_files_and_meta(store: CheckpointStore) -> None:
    """behaviour: B13"""
    assert store.latest() is None
    saved = store.save(7, writer(), META)
    latest = CheckpointStore(store.root, keep=RetentionConfig(newest=2)).latest()
    assert latest == saved
    assert (latest.step, latest.meta, sorted(latest.files)) == (7, META, ["model.bin", "optim/rank0.bin"])
    folder = store.restore(latest)
    assert (folder / "optim" / "rank0.bin").read_text() == "weights"


def test_a_save_returns_the_manifest_as_it_will_be_read(store: CheckpointStore) -> None:
    saved = store.save(1, writer(), {"frontier": ("a", "b")})
    assert saved.meta == {"frontier": ["a", "b"]}
    store.restore(saved)


def test_only_the_newest_are_kept_and_a_step_that_went_back_is_newer(store: CheckpointStore) -> None:
    for step in (10, 20, 30, 20):
        store.save(step, writer(), META)
    assert [manifest.step for manifest in store.scan().whole] == [30, 20]
    assert newest_step(store) == 20
    assert len(list(store.root.iterdir())) == 2


@pytest.mark.parametrize("moment", ["write", "before the manifest's rename", "after the folder's rename"])
def test_a_save_killed_at_any_moment_is_ignored_with_a_warning(
    store: CheckpointStore, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """behaviour: B13, B12"""
    store.save(1, writer(), META)
    code = f"""
import os, signal, sys
from pathlib import Path
from relax.checkpoint import store as module
moment = {moment!r}
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
def write(folder):
    (folder / "model.bin").write_text("half")
    if moment == "write": die()
rename = Path.rename
def renames(self, target):
    if moment == "before the manifest's rename": die()
    rename(self, target)
    if moment == "after the folder's rename": die()
Path.rename = renames
module.CheckpointStore(Path({str(store.root)!r}), keep=module.RetentionConfig(newest=2)).save(2, write, {{}})
"""
    killed = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with caplog.at_level(logging.WARNING):
        assert newest_step(store) == 1
    assert "ignoring" in caplog.text and "interrupted" in caplog.text
    assert len(store.scan().warnings) == 1
    store.save(3, writer(), META)
    assert newest_step(store) == 3
    assert store.scan().warnings == (), "the next save cleans up"


def damage_truncate(folder: Path) -> None:
    with (folder / "model.bin").open("r+b") as file:
        file.truncate(10)


def damage_remove(folder: Path) -> None:
    (folder / "optim" / "rank0.bin").unlink()


def damage_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:-20])


@pytest.mark.parametrize("damage", [damage_truncate, damage_remove, damage_manifest])
def test_a_torn_checkpoint_is_ignored_with_a_warning_that_names_it(
    store: CheckpointStore, damage: Callable[[Path], None]
) -> None:
    """behaviour: B13"""
    store.save(1, writer(), META)
    newest = store.restore(store.save(2, writer(), META))
    damage(newest)
    assert newest_step(store) == 1
    (warning,) = store.scan().warnings
    assert str(newest) in warning


def test_a_changed_byte_is_found_at_restore_and_the_one_before_is_taken(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """behaviour: B13"""
    store.save(1, writer(), META)
    newest = store.save(2, writer(), META)
    path = store.restore(newest) / "model.bin"
    path.write_bytes(b"X" + path.read_bytes()[1:])
    with pytest.raises(CorruptCheckpoint, match=r"model\.bin has digest"):
        store.restore(newest)
    restored = store.restore_latest()
    assert restored is not None and restored[0].step == 1
    assert "damaged checkpoint of step 2" in caplog.text


def test_the_manifest_asked_for_must_be_the_one_on_disk(store: CheckpointStore) -> None:
    saved = store.save(1, writer(), META)
    other = CheckpointManifest(**{**saved.model_dump(), "meta": {}})
    with pytest.raises(CorruptCheckpoint, match="another checkpoint"):
        store.restore(other)


def test_an_error_of_the_writer_passes_through_and_leaves_the_last_checkpoint(store: CheckpointStore) -> None:
    """behaviour: B13"""
    store.save(1, writer(), META)

    def fails(folder: Path) -> None:
        (folder / "half.bin").write_text("x")
        raise RuntimeError("rank 1 died")

    with pytest.raises(RuntimeError, match="rank 1 died"):
        store.save(2, fails, META)
    with pytest.raises(CheckpointError, match="nothing was written"):
        store.save(2, lambda folder: None, META)
    assert newest_step(store) == 1
    assert len(list(store.root.iterdir())) == 1


def test_a_begun_checkpoint_is_seen_after_its_commit_and_never_after_an_abort(store: CheckpointStore) -> None:
    """behaviour: B13"""
    aborted = store.begin(1)
    writer()(aborted)
    store.abort(aborted)
    begun = store.begin(2)
    writer()(begun)
    assert store.latest() is None
    assert store.commit(2, begun, META) == store.latest()
    assert len(list(store.root.iterdir())) == 1


def test_a_manifest_that_cannot_be_renamed_leaves_no_folder(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B13"""
    store.save(1, writer(), META)
    rename = Path.rename

    def fails_for_the_manifest(path: Path, target: Path) -> Path:
        if path.name.startswith("manifest"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_manifest)
    with pytest.raises(NoSpace):
        store.save(2, writer(), META)
    assert newest_step(store) == 1
    assert len(list(store.root.iterdir())) == 1


def test_too_little_space_is_found_before_the_writer_runs(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B47"""
    first = store.save(1, writer(), META)
    store.reserve_bytes = 5000
    monkeypatch.setattr(space, "free_bytes", lambda folder: 5000 + first.n_bytes - 1)
    with pytest.raises(NoSpace, match=r"checkpoint of step 2 in .*keep_checkpoints; the run goes on") as raised:
        store.save(2, lambda folder: pytest.fail("wrote in spite of the check"), META)
    assert raised.value.need_bytes == first.n_bytes
    assert newest_step(store) == 1
    monkeypatch.setattr(space, "free_bytes", lambda folder: 5000 + first.n_bytes)
    assert store.save(2, writer(), META).step == 2
    with pytest.raises(NoSpace):
        store.save(3, writer(), META, expected_bytes=first.n_bytes + 1)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("[enforce fail at inline_container.cc] file write failed: No space left on device"),
    ],
    ids=["python", "archive writer"],
)
def test_a_disk_that_fills_while_saving_is_a_typed_error(store: CheckpointStore, error: Exception) -> None:
    """behaviour: B47"""
    store.save(1, writer(), META)

    def fills(folder: Path) -> None:
        (folder / "half.bin").write_text("x")
        raise error

    with pytest.raises(NoSpace):
        store.save(2, fills, META)
    assert newest_step(store) == 1
    assert len(list(store.root.iterdir())) == 1


def write_bytes(folder: Path) -> None:
    (folder / "b.bin").write_bytes(b"b" * 500_000)


def write_torch(folder: Path) -> None:
    torch.save({"a": torch.zeros(125_000)}, folder / "b.pt")


def write_safetensors(folder: Path) -> None:
    save_file({"a": torch.zeros(125_000)}, folder / "b.safetensors")


@pytest.mark.parametrize("write", [write_bytes, write_torch, write_safetensors])
def test_a_really_full_disk_keeps_the_last_checkpoint_and_gets_its_space_back(
    small_disk: Path, write: Callable[[Path], None]
) -> None:
    """behaviour: B47"""
    store = CheckpointStore(small_disk / "checkpoints", keep=RetentionConfig(newest=1))
    good = store.save(1, lambda folder: (folder / "a.bin").write_bytes(b"a" * 50_000) and None, META)
    free = space.free_bytes(small_disk)
    with pytest.raises(NoSpace, match="step 2"):
        store.save(2, write, META)
    assert space.free_bytes(small_disk) == free
    restored = store.restore_latest()
    assert restored is not None and restored[0] == good
    again = store.save(3, lambda folder: (folder / "c.bin").write_bytes(b"c" * 50_000) and None, META)
    assert store.latest() == again


def test_one_that_is_being_read_stays_until_a_later_save(store: CheckpointStore) -> None:
    first = store.save(1, writer(), META)
    with reading(store.folder(first)) as folder:
        for step in (2, 3, 4):
            store.save(step, writer(), META)
        assert (folder / "optim" / "rank0.bin").read_text() == "weights"
        assert [manifest.step for manifest in store.scan().whole] == [1, 3, 4]
    store.save(5, writer(), META)
    assert [manifest.step for manifest in store.scan().whole] == [4, 5]
    with pytest.raises(CorruptCheckpoint, match="being removed"), reading(folder):
        pass


def test_the_best_by_the_record_of_their_step_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=RetentionConfig(newest=1, best=1, best_by="reward_mean"))
    for step, reward in ((1, 0.2), (2, 0.9), (3, 0.4), (4, 0.3)):
        store.save(step, writer(), {"record": {"reward_mean": reward}})
    assert [manifest.step for manifest in store.scan().whole] == [2, 4]


def test_one_of_another_schema_version_is_refused_with_what_to_do_and_never_removed(store: CheckpointStore) -> None:
    """Neither passed over as torn nor collected: it may be the only whole one."""
    older, newer = (store.folder(store.save(step, writer(), META)) for step in (1, 2))
    text = (older / MANIFEST_NAME).read_text()
    (older / MANIFEST_NAME).write_text(text.replace('"schema_version": 1', '"schema_version": 7'))
    for refused in (store.latest, store.restore_latest):
        with pytest.raises(
            CheckpointSchemaError, match=r"version 7, this program reads 1: continue .* or move"
        ) as caught:
            refused()
        assert str(older) in str(caught.value)
    for step in (3, 4, 5):
        store.save(step, writer(), META)
    assert older.is_dir() and not newer.exists()

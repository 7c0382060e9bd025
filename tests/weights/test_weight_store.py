"""Published weights: round trip, all-or-nothing, faults, space, collection."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from relax.config.run import Fault
from relax.types import PolicyVersion
from relax.weights import buckets, space
from relax.weights.digest import tensors_digest
from relax.weights.manifest import CorruptWeights, StaleVersion, VersionGone, WeightsError, read_manifest
from relax.weights.space import NoSpace
from relax.weights.store import WeightStore

BUCKET_BYTES = 4096


def v(number: int) -> PolicyVersion:
    return PolicyVersion(number)


def some_tensors(seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("embed.weight", torch.randn(40, 16, generator=generator)),
        ("layers.0.q.weight", torch.randn(16, 16, generator=generator).t()),
        ("layers.0.norm.weight", torch.randn(33, generator=generator).to(torch.bfloat16)),
        ("layers.1.up.weight", torch.randn(64, 32, generator=generator)),
        ("scale", torch.tensor(2.0)),
    ]


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", keep=2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=10).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


def test_a_published_version_reads_back_bit_equal_with_the_digest_of_the_live_tensors(store: WeightStore) -> None:
    """behaviour: B2"""
    tensors = some_tensors()
    manifest = store.publish(v(0), 0, iter(tensors), BUCKET_BYTES)
    read = dict(store.open(v(0)).tensors())
    assert manifest.digest == tensors_digest(tensors) == tensors_digest(read.items()) == store.open(v(0)).verify()
    assert len(manifest.buckets) > 1
    for name, tensor in tensors:
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_a_bucket_is_a_file_that_the_safetensors_library_reads(store: WeightStore) -> None:
    manifest = store.publish(v(0), 0, some_tensors(), BUCKET_BYTES)
    loaded: dict[str, Tensor] = {}
    for bucket in manifest.buckets:
        loaded.update(load_file(store.root / "v00000000" / bucket))
    assert tensors_digest(loaded.items()) == manifest.digest


def test_a_bucket_holds_at_most_bucket_bytes_unless_one_tensor_is_larger(store: WeightStore) -> None:
    tensors = some_tensors()
    sizes = dict((name, buckets.n_bytes(tensor)) for name, tensor in tensors)
    manifest = store.publish(v(0), 0, tensors, BUCKET_BYTES)
    for bucket in manifest.buckets:
        held = [sizes[name] for name, entry in manifest.tensors.items() if entry.bucket == bucket]
        assert len(held) == 1 or sum(held) <= BUCKET_BYTES


def test_staged_bytes_do_not_follow_the_live_tensors(store: WeightStore) -> None:
    tensors = some_tensors()
    before = tensors_digest(tensors)
    staged = store.stage(v(0), 0, tensors, BUCKET_BYTES)
    for _, tensor in tensors:
        tensor.add_(1)
    assert store.commit(staged).digest == before == store.open(v(0)).verify()


def test_a_version_is_seen_only_after_its_commit(store: WeightStore) -> None:
    """behaviour: B4"""
    store.publish(v(0), 0, some_tensors(0), BUCKET_BYTES)
    staged = store.stage(v(1), 1, some_tensors(1), BUCKET_BYTES)
    latest = store.latest()
    assert latest is not None and latest.version == 0
    with pytest.raises(VersionGone):
        store.open(v(1))
    store.commit(store.staged(staged.folder.name))
    latest = store.latest()
    assert latest is not None and (latest.version, latest.step) == (1, 1)


def test_a_commit_is_one_rename_of_the_staged_folder(store: WeightStore) -> None:
    """behaviour: B4"""
    staged = store.stage(v(0), 0, some_tensors(), BUCKET_BYTES)
    inode = staged.folder.stat().st_ino
    store.commit(staged)
    assert (store.root / "v00000000").stat().st_ino == inode


def test_nothing_published_is_told_apart_from_a_version(store: WeightStore) -> None:
    assert store.latest() is None


@pytest.mark.parametrize("fault", [Fault.CORRUPT_BUCKET, Fault.DROP_TENSOR])
def test_a_commit_refuses_a_damaged_staging_and_the_old_version_stays(store: WeightStore, fault: Fault) -> None:
    """behaviour: B4"""
    store.publish(v(0), 0, some_tensors(0), BUCKET_BYTES)
    staged = store.stage(v(1), 1, some_tensors(1), BUCKET_BYTES, faults=(fault,))
    with pytest.raises(CorruptWeights, match="tensor '"):
        store.commit(staged)
    assert visible(store.root) == ["v00000000"]
    assert store.commit(store.stage(v(1), 1, some_tensors(1), BUCKET_BYTES)).version == 1


@pytest.mark.parametrize(
    ("fault", "text"), [(Fault.CORRUPT_BUCKET, "has digest"), (Fault.DROP_TENSOR, "'embed.weight' is missing")]
)
def test_a_reader_refuses_a_version_that_was_damaged_after_its_commit(
    store: WeightStore, fault: Fault, text: str
) -> None:
    """behaviour: B2"""
    store.publish(v(0), 0, some_tensors(), BUCKET_BYTES, faults=(fault,))
    with pytest.raises(CorruptWeights, match=text):
        store.open(v(0)).verify()


def test_a_changed_manifest_is_refused(store: WeightStore) -> None:
    """behaviour: B2"""
    store.publish(v(0), 0, some_tensors(), BUCKET_BYTES)
    path = store.root / "v00000000" / "manifest.json"
    data = json.loads(path.read_text())
    del data["tensors"]["scale"]
    path.write_text(json.dumps(data))
    with pytest.raises(CorruptWeights, match="manifest digest"):
        store.open(v(0)).verify()


def test_a_manifest_of_another_schema_is_refused_by_number(store: WeightStore) -> None:
    store.publish(v(0), 0, some_tensors(), BUCKET_BYTES)
    path = store.root / "v00000000" / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version":1', '"schema_version":2'))
    with pytest.raises(CorruptWeights, match="not a manifest of schema 1: schema_version"):
        store.latest()


def test_versions_never_go_back(store: WeightStore) -> None:
    """behaviour: B10"""
    store.publish(v(5), 5, some_tensors(), BUCKET_BYTES)
    for stale in (4, 5):
        with pytest.raises(StaleVersion, match=f"v{stale} .*v5 is visible"):
            store.stage(v(stale), stale, some_tensors(), BUCKET_BYTES)
    assert visible(store.root) == ["v00000005"]


def test_a_repeated_commit_answers_as_the_first(store: WeightStore) -> None:
    staged = store.stage(v(0), 0, some_tensors(), BUCKET_BYTES)
    assert store.commit(staged) == store.commit(staged)


def test_a_staging_left_by_a_dead_publisher_is_removed_by_the_next(store: WeightStore) -> None:
    """behaviour: B47"""
    dead = store.stage(v(1), 1, some_tensors(), BUCKET_BYTES)
    fresh = store.stage(v(1), 1, some_tensors(1), BUCKET_BYTES)
    assert visible(store.root) == [fresh.folder.name]
    with pytest.raises(VersionGone):
        store.commit(dead)


def test_an_error_of_the_tensor_stream_leaves_nothing_behind(store: WeightStore) -> None:
    """behaviour: B4"""

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from some_tensors()
        raise RuntimeError("rank 3 died")

    with pytest.raises(RuntimeError, match="rank 3 died"):
        store.publish(v(0), 0, broken(), BUCKET_BYTES)
    assert visible(store.root) == []


@pytest.mark.parametrize(
    ("tensors", "text"),
    [([], "has no tensors"), ([("a", torch.zeros(2)), ("a", torch.zeros(2))], "'a' is given twice")],
    ids=["none", "twice"],
)
def test_an_empty_or_ambiguous_version_is_refused(
    store: WeightStore, tensors: list[tuple[str, Tensor]], text: str
) -> None:
    with pytest.raises(WeightsError, match=text):
        store.publish(v(0), 0, tensors, BUCKET_BYTES)
    assert visible(store.root) == []


def test_a_reader_keeps_its_mapped_tensors_after_collection(store: WeightStore) -> None:
    tensors = some_tensors(0)
    store.publish(v(0), 0, tensors, BUCKET_BYTES)
    reader = store.open(v(0))
    for number in (1, 2):
        store.publish(v(number), number, some_tensors(number), BUCKET_BYTES)
    assert visible(store.root) == ["v00000001", "v00000002"]
    assert reader.verify() == tensors_digest(tensors)


def test_read_tensors_lie_in_the_mapped_bucket(store: WeightStore) -> None:
    store.publish(v(0), 0, some_tensors(), BUCKET_BYTES)
    spans = []
    reader = store.open(v(0))
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(store.root) in line:
            low, high = line.split()[0].split("-")
            spans.append((int(low, 16), int(high, 16)))
    for name, tensor in reader.tensors():
        assert any(low <= tensor.data_ptr() < high for low, high in spans), name


def test_a_pinned_version_outlives_collection_until_each_pin_is_gone(store: WeightStore) -> None:
    store.publish(v(0), 0, some_tensors(), BUCKET_BYTES)
    store.pin(v(0))
    store.pin(v(0))
    for number in (1, 2, 3):
        store.publish(v(number), number, some_tensors(), BUCKET_BYTES)
    assert store.versions() == [0, 2, 3]
    store.unpin(v(0))
    assert store.collect() == []
    assert store.collect(pinned=[v(2)], keep=1) == []
    store.unpin(v(0))
    assert store.collect() == [0]
    with pytest.raises(ValueError, match="not pinned"):
        store.unpin(v(0))
    with pytest.raises(VersionGone):
        store.pin(v(0))


def test_too_little_space_is_found_before_a_byte_is_written(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B47"""
    store.reserve_bytes = 1 << 20
    monkeypatch.setattr(space, "free_bytes", lambda folder: (1 << 20) + 4000)
    monkeypatch.setattr(buckets, "write_bucket", lambda *_: pytest.fail("wrote in spite of the check"))
    with pytest.raises(
        NoSpace, match=r"weights v0 in .*needs 0\.0 MiB and must leave 1\.0 MiB.*keep_versions"
    ) as raised:
        store.publish(v(0), 0, some_tensors(), BUCKET_BYTES)
    assert raised.value.need_bytes == sum(buckets.n_bytes(tensor) for _, tensor in some_tensors())
    assert visible(store.root) == []


def test_a_disk_that_fills_while_a_bucket_is_written_leaves_the_last_version(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B47"""
    store.publish(v(0), 0, some_tensors(), BUCKET_BYTES)
    real, calls = buckets._write_all, []

    def fills(file: object, data: memoryview) -> None:
        calls.append(len(data))
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, data)  # type: ignore[arg-type]

    monkeypatch.setattr(buckets, "_write_all", fills)
    with pytest.raises(NoSpace):
        store.publish(v(1), 1, some_tensors(1), BUCKET_BYTES)
    monkeypatch.undo()
    assert visible(store.root) == ["v00000000"]
    assert store.publish(v(1), 1, some_tensors(1), BUCKET_BYTES).version == 1


def test_a_really_full_filesystem_gives_no_space_and_frees_what_was_staged(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B47"""
    store = WeightStore(small_disk / "weights", keep=1)
    store.publish(v(0), 0, [("a", torch.zeros(8192))], BUCKET_BYTES)
    free = space.free_bytes(small_disk)
    monkeypatch.setattr(space, "check_space", lambda *_: None)
    monkeypatch.setattr("relax.weights.store.check_space", lambda *_: None)
    big = [(f"t{i}", torch.zeros(16384)) for i in range(5)]
    with pytest.raises(NoSpace):
        store.publish(v(1), 1, iter(big), BUCKET_BYTES)
    assert visible(store.root) == ["v00000000"]
    assert space.free_bytes(small_disk) == free
    assert read_manifest(store.root / "v00000000").version == 0
    del store


def test_the_service_that_verifies_and_commits_loads_no_torch() -> None:
    script = "import sys, services.dcs.deployment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0

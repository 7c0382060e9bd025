"""Published weights in a (memory-backed) folder: staged, verified, made visible by one rename, collected.

    <root>/v00000007/                     visible: bucket-00000.safetensors ... manifest.json
    <root>/.staging-v00000008-<nonce>/    being written, or waiting for its commit
    <root>/.trash-<nonce>/                being removed

One process publishes at a time; any number read. Readers map the buckets when they open a version, so
collecting it takes nothing away from them: the memory goes back when the last mapping ends.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relax.config.run import Fault
from relax.types import PolicyVersion
from relax.weights import buckets
from relax.weights.digest import bytes_digest, dtype_name, host_bytes, version_digest
from relax.weights.manifest import (
    MANIFEST_NAME,
    CorruptWeights,
    Manifest,
    StaleVersion,
    TensorEntry,
    VersionGone,
    WeightsError,
    read_manifest,
)
from relax.weights.space import NoSpace, check_space, free_bytes, ran_full

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_VISIBLE = re.compile(r"^v(\d{8,})$")
_STAGING = re.compile(r"^\.staging-v(\d{8,})-[0-9a-f]+$")
_REMEDY = "lower dcs.keep_versions, or point dcs.shm_dir at a larger memory-backed folder"


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """Written and digested, seen by nobody yet. `folder` is enough to find it again in another process."""

    folder: Path
    manifest: Manifest


class ReadableVersion:
    """A version whose buckets are mapped. Not affected when the store collects it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = read_manifest(folder)
        try:
            self._mapped = buckets.MappedBuckets(folder, self.manifest)
        except FileNotFoundError as error:
            if folder.exists():
                raise CorruptWeights(f"{folder} lacks a bucket of its manifest: {error}") from error
            raise VersionGone(f"{folder} was collected while it was opened") from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) in sorted order, without a copy: do not write to them.

        Raises `CorruptWeights` when one is missing. Content is checked by `verify` alone.
        """
        for name, stored in self._stored():
            yield name, stored.tensor()

    def _stored(self) -> Iterator[tuple[str, buckets.StoredTensor]]:
        for name in sorted(self.manifest.tensors):
            stored = self._mapped.get(name)
            if stored is None:
                raise CorruptWeights(
                    f"{self.folder.name}: tensor '{name}' is missing from {self.manifest.tensors[name].bucket}"
                )
            yield name, stored

    def verify(self) -> str:
        """Read everything and return the version's digest; raise `CorruptWeights` at the first difference.

        Needs no torch.
        """
        entries = self.manifest.tensors
        if (found := version_digest(entries)) != self.manifest.digest:
            raise CorruptWeights(
                f"{self.folder.name}: manifest digest {self.manifest.digest}, its tensors give {found}"
            )
        for bucket, names in self._mapped.names_by_bucket.items():
            if surplus := {name for name in names if name not in entries or entries[name].bucket != bucket}:
                raise CorruptWeights(f"{self.folder.name}: {bucket} holds tensors not in its manifest: {min(surplus)}")
        for name, stored in self._stored():
            entry = entries[name]
            if (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
                raise CorruptWeights(
                    f"{self.folder.name}: tensor '{name}' is {stored.dtype} {stored.shape}, "
                    f"its manifest says {entry.dtype} {entry.shape}"
                )
            if (digest := bytes_digest(stored.data)) != entry.digest:
                raise CorruptWeights(
                    f"{self.folder.name}: tensor '{name}' in {entry.bucket} has digest {digest}, "
                    f"its manifest says {entry.digest}"
                )
        return self.manifest.digest


class WeightStore:
    """The versions under `root`, which is made if missing.

    `keep` newest versions survive a commit, besides pinned ones. Pins are this object's own: the process
    that commits and collects holds them. `reserve_bytes` stay free on the filesystem.
    """

    def __init__(self, root: Path, keep: int, reserve_bytes: int = 0):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, is {keep}")
        self.root = root
        self.keep = keep
        self.reserve_bytes = reserve_bytes
        self._pins: Counter[PolicyVersion] = Counter()
        self._lock = threading.Lock()
        root.mkdir(parents=True, exist_ok=True)

    def stage(
        self,
        version: PolicyVersion,
        step: int,
        tensors: Iterable[tuple[str, Tensor]],
        bucket_bytes: int,
        *,
        lineage: int = 0,
        faults: Sequence[Fault] = (),
    ) -> StagedVersion:
        """Copy the tensors, bucket by bucket, into a folder that nobody sees.

        When it returns the caller may change the tensors. Other stagings up to `version` are removed: a
        publisher that died, or was replaced, left them. Raises `NoSpace`, `StaleVersion`, `WeightsError`;
        nothing is left behind then.
        """
        self._refuse_stale(version)
        self._remove_stagings(through=version)
        folder = self.root / f".staging-v{version:08d}-{uuid.uuid4().hex[:12]}"
        if isinstance(tensors, Sequence):
            self._check_space(version, sum(buckets.n_bytes(tensor) for _, tensor in tensors))
        try:
            folder.mkdir()
            entries = self._write(folder, version, tensors, bucket_bytes)
            manifest = Manifest(
                version=version,
                step=step,
                lineage=lineage,
                digest=version_digest(entries),
                n_bytes=sum((folder / name).stat().st_size for name in {entry.bucket for entry in entries.values()}),
                tensors=entries,
            )
            (folder / MANIFEST_NAME).write_text(manifest.model_dump_json())
            buckets.inject_faults(folder, manifest, faults)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, FileNotFoundError):
                raise WeightsError(f"staging of v{version} was removed under the writer by a newer one") from error
            raise
        return StagedVersion(folder, manifest)

    def staged(self, folder_name: str) -> StagedVersion:
        """A staging found by the name of its folder, as another process handed it over."""
        if not _STAGING.match(folder_name):
            raise WeightsError(f"'{folder_name}' is not the name of a staged version")
        folder = self.root / folder_name
        return StagedVersion(folder, read_manifest(folder))

    def commit(self, staged: StagedVersion, *, faults: Sequence[Fault] = ()) -> Manifest:
        """Verify every tensor, then make the version visible and collect old ones.

        A repeated commit of the same content answers as the first did. Raises `CorruptWeights` (the staging
        is removed, nothing becomes visible), `StaleVersion`, `VersionGone` if the staging was removed.
        `faults` damage the version after it was verified, so that only its readers can notice.
        """
        target = version_folder(self.root, staged.manifest.version)
        if not staged.folder.exists() and target.exists():
            published = read_manifest(target)
            if published.digest == staged.manifest.digest:
                return published
        self._refuse_stale(staged.manifest.version)
        try:
            readable = ReadableVersion(staged.folder)
            if readable.verify() != staged.manifest.digest:
                raise CorruptWeights(f"{staged.folder.name} holds another version than the one that was staged")
        except CorruptWeights:
            shutil.rmtree(staged.folder, ignore_errors=True)
            raise
        buckets.inject_faults(staged.folder, staged.manifest, faults)
        staged.folder.rename(target)
        self._remove_stagings(through=staged.manifest.version)
        self.collect()
        return staged.manifest

    def publish(
        self,
        version: PolicyVersion,
        step: int,
        tensors: Iterable[tuple[str, Tensor]],
        bucket_bytes: int,
        *,
        lineage: int = 0,
        faults: Sequence[Fault] = (),
    ) -> Manifest:
        """Stage and commit in one process; `faults` damage the visible version, as in `commit`."""
        return self.commit(self.stage(version, step, tensors, bucket_bytes, lineage=lineage), faults=faults)

    def versions(self) -> list[PolicyVersion]:
        """Visible versions, oldest first."""
        found = (_VISIBLE.match(path.name) for path in self.root.iterdir())
        return sorted(PolicyVersion(int(match[1])) for match in found if match)

    def latest(self) -> Manifest | None:
        """The newest visible version. Raises `CorruptWeights` if its manifest cannot be read."""
        for version in reversed(self.versions()):
            try:
                return read_manifest(version_folder(self.root, version))
            except VersionGone:
                continue  # collected after it was listed, so a newer one exists or an older is as good
        return None

    def open(self, version: PolicyVersion) -> ReadableVersion:
        """Map a visible version. Raises `VersionGone`, `CorruptWeights`."""
        return ReadableVersion(version_folder(self.root, version))

    def pin(self, version: PolicyVersion) -> None:
        """Keep a version from collection until as many `unpin` calls. Raises `VersionGone`."""
        with self._lock:
            if not (version_folder(self.root, version)).exists():
                raise VersionGone(f"v{version} is not published in {self.root}")
            self._pins[version] += 1

    def unpin(self, version: PolicyVersion) -> None:
        with self._lock:
            if self._pins[version] <= 0:
                raise ValueError(f"v{version} is not pinned")
            self._pins[version] -= 1

    def collect(self, keep: int | None = None, pinned: Collection[PolicyVersion] = ()) -> list[PolicyVersion]:
        """Remove all but the `keep` newest (default: the store's) and the pinned versions; return the removed."""
        count = self.keep if keep is None else keep
        if count < 1:
            raise ValueError(f"keep must be at least 1, is {count}")
        with self._lock:
            held = {version for version, pins in self._pins.items() if pins > 0} | set(pinned)
            removed = [version for version in self.versions()[:-count] if version not in held]
            for version in removed:
                self._remove(version_folder(self.root, version))
        return removed

    def _write(
        self, folder: Path, version: PolicyVersion, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
    ) -> dict[str, TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        for file_name, bucket in buckets.in_buckets(tensors, bucket_bytes):
            host = [(name, tensor.detach().cpu().contiguous()) for name, tensor in bucket]
            for name, tensor in host:
                if name in entries:
                    raise WeightsError(f"tensor '{name}' is given twice")
                entries[name] = TensorEntry(
                    bucket=file_name,
                    dtype=dtype_name(tensor.dtype),
                    shape=tuple(tensor.shape),
                    digest=bytes_digest(host_bytes(tensor)),
                )
            need = sum(buckets.n_bytes(tensor) for _, tensor in host)
            self._check_space(version, need)
            try:
                buckets.write_bucket(folder / file_name, host)
            except OSError as error:
                if ran_full(error):
                    free = free_bytes(self.root)
                    raise NoSpace(f"weights v{version}", self.root, need, free, self.reserve_bytes, _REMEDY) from error
                raise
        if not entries:
            raise WeightsError(f"v{version} has no tensors")
        return entries

    def _check_space(self, version: PolicyVersion, need_bytes: int) -> None:
        check_space(f"weights v{version}", self.root, need_bytes, self.reserve_bytes, _REMEDY)

    def _refuse_stale(self, version: PolicyVersion) -> None:
        versions = self.versions()
        if versions and version <= versions[-1]:
            raise StaleVersion(f"v{version} cannot be published: v{versions[-1]} is visible already")

    def _remove_stagings(self, through: PolicyVersion) -> None:
        for path in self.root.iterdir():
            match = _STAGING.match(path.name)
            if (match and int(match[1]) <= through) or path.name.startswith(".trash-"):
                logger.info("removing %s, left by an earlier publisher", path)
                self._remove(path)

    def _remove(self, folder: Path) -> None:
        # Renamed first: a version is visible whole or not at all, also while it is being removed.
        trash = self.root / f".trash-{uuid.uuid4().hex[:12]}"
        try:
            folder.rename(trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)


def version_folder(root: Path, version: PolicyVersion) -> Path:
    return root / f"v{version:08d}"

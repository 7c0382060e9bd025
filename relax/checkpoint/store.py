"""Checkpoints on disk: visible when complete, by one rename of the manifest (B13).

    <root>/.writing-<nonce>/                    being written
    <root>/ckpt-000003-step-00000120/           files, then manifest.json renamed into place: visible
    <root>/ckpt-000002-step-00000080/           without manifest.json: torn, ignored with a warning

One process saves at a time; any number read. Who reads holds a shared lock on the manifest (`reading`), and a
checkpoint that is read is not removed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relax.checkpoint.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    CheckpointError,
    CheckpointManifest,
    CheckpointSchemaError,
    CorruptCheckpoint,
    FileEntry,
    file_entry,
)
from relax.checkpoint.retention import Saved, kept
from relax.config.roles import RetentionConfig
from relax.weights.space import NoSpace, check_space, free_bytes, ran_full

logger = logging.getLogger(__name__)

_NAME = re.compile(r"^ckpt-(\d{6,})-step-(\d{8,})$")
_WRITING = ".writing-"
_REMEDY = (
    "free space on that disk, or keep fewer by dcs.keep_checkpoints; the run goes on from the last good checkpoint"
)


@dataclass(frozen=True, slots=True)
class Scan:
    """What a folder of checkpoints holds: whole ones, oldest first, a warning for each torn one, and the folders of
    those with another schema version."""

    whole: tuple[CheckpointManifest, ...]
    warnings: tuple[str, ...]
    foreign: tuple[Path, ...] = ()


class CheckpointStore:
    """The checkpoints under `root`, which is made if missing. `keep` says which stay after a save.

    `reserve_bytes` must stay free on the disk beyond the expected size.
    """

    def __init__(self, root: Path, keep: RetentionConfig | None = None, reserve_bytes: int = 0):
        self.root = root
        self.keep = keep or RetentionConfig()
        self.reserve_bytes = reserve_bytes
        root.mkdir(parents=True, exist_ok=True)

    def save(
        self, step: int, write: Callable[[Path], None], meta: dict[str, Any], *, expected_bytes: int | None = None
    ) -> CheckpointManifest:
        """`begin`, let `write` fill the folder, `commit`. Whatever `write` raises passes through."""
        writing = self.begin(step, expected_bytes)
        try:
            write(writing)
        except BaseException as error:
            self._give_up(writing, step, error)
            raise
        return self.commit(step, writing, meta)

    def begin(self, step: int, expected_bytes: int | None = None) -> Path:
        """An empty folder for one checkpoint; `commit` or `abort` ends it.

        `expected_bytes` defaults to the size of the newest checkpoint. Raises `NoSpace` before anything is written.
        """
        self._remove_unfinished()
        whole = self.scan().whole
        need = expected_bytes if expected_bytes is not None else whole[-1].n_bytes if whole else 0
        check_space(f"the checkpoint of step {step}", self.root, need, self.reserve_bytes, _REMEDY)
        writing = self.root / f"{_WRITING}{uuid.uuid4().hex[:12]}"
        writing.mkdir()
        return writing

    def abort(self, writing: Path) -> None:
        """Forget a begun checkpoint."""
        shutil.rmtree(writing, ignore_errors=True)

    def commit(self, step: int, writing: Path, meta: dict[str, Any]) -> CheckpointManifest:
        """Make the filled folder a checkpoint and collect old ones.

        Raises `NoSpace` when the disk fills, `CheckpointError` for an empty folder. In every case the earlier
        checkpoints stay good and no new one is visible.
        """
        serial = self._next_serial()
        target = self.root / _folder_name(serial, step)
        try:
            files = _seal_files(writing)
            if not files:
                raise CheckpointError(f"nothing was written for the checkpoint of step {step}")
            text = CheckpointManifest(serial=serial, step=step, meta=meta, files=files).model_dump_json(indent=1)
            manifest = CheckpointManifest.model_validate_json(text)  # as it will be read
            _write_durably(writing / f"{MANIFEST_NAME}.tmp", text)
            _sync(writing)
            writing.rename(target)
            (target / f"{MANIFEST_NAME}.tmp").rename(target / MANIFEST_NAME)
            _sync(target)
            _sync(self.root)
        except BaseException as error:
            self._remove(target)
            self._give_up(writing, step, error)
            raise
        self._collect()
        return manifest

    def folder(self, manifest: CheckpointManifest) -> Path:
        return self.root / _folder_name(manifest.serial, manifest.step)

    def _give_up(self, writing: Path, step: int, error: BaseException) -> None:
        """Remove what was written; raise `NoSpace` where the disk was full."""
        need = sum(path.stat().st_size for path in writing.rglob("*") if path.is_file())
        shutil.rmtree(writing, ignore_errors=True)
        if ran_full(error):
            raise NoSpace(
                f"the checkpoint of step {step}", self.root, need, free_bytes(self.root), self.reserve_bytes, _REMEDY
            ) from error

    def scan(self) -> Scan:
        """Read all manifests and compare file sizes; contents are checked by `restore`."""
        whole: list[CheckpointManifest] = []
        warnings: list[str] = []
        foreign: list[Path] = []
        for path in sorted(self.root.iterdir()):
            if not _NAME.match(path.name):
                if path.name.startswith(_WRITING):
                    warnings.append(f"ignoring unfinished checkpoint {path}: its save was interrupted")
                continue
            try:
                whole.append(_read(path))
            except CorruptCheckpoint as error:
                warnings.append(f"ignoring torn checkpoint {path}: {error}")
            except CheckpointSchemaError:
                foreign.append(path)
        return Scan(tuple(sorted(whole, key=lambda manifest: manifest.serial)), tuple(warnings), tuple(foreign))

    def latest(self) -> CheckpointManifest | None:
        """The newest whole checkpoint; torn ones are logged as warnings. Raises `CheckpointSchemaError`."""
        scan = self._readable()
        return scan.whole[-1] if scan.whole else None

    def restore(self, manifest: CheckpointManifest) -> Path:
        """The folder of a checkpoint, after every file was compared with its digest.

        Raises `CorruptCheckpoint` that names the first file which differs.
        """
        folder = self.folder(manifest)
        if _read(folder) != manifest:
            raise CorruptCheckpoint(f"{folder} holds another checkpoint than the one asked for")
        for name, entry in manifest.files.items():
            if (found := file_entry(folder / name).digest) != entry.digest:
                raise CorruptCheckpoint(f"{folder / name} has digest {found}, its manifest says {entry.digest}")
        return folder

    def restore_latest(self, warn: Callable[[str], None] = logger.warning) -> tuple[CheckpointManifest, Path] | None:
        """The newest checkpoint that passes `restore`; `warn` is told of those that do not.

        Raises `CheckpointSchemaError`: to go back behind what another version saved is the user's to decide.
        """
        scan = self._readable(warn)
        for manifest in reversed(scan.whole):
            try:
                return manifest, self.restore(manifest)
            except CorruptCheckpoint as error:
                warn(f"ignoring damaged checkpoint of step {manifest.step}: {error}")
        return None

    def _readable(self, warn: Callable[[str], None] = logger.warning) -> Scan:
        scan = self.scan()
        for path in scan.foreign:
            _read(path)  # raises, with the words
        for warning in scan.warnings:
            warn(warning)
        return scan

    def _next_serial(self) -> int:
        serials = [int(match[1]) for path in self.root.iterdir() if (match := _NAME.match(path.name))]
        return max(serials, default=-1) + 1

    def _collect(self) -> None:
        scan = self.scan()
        stay = kept([Saved(m.serial, m.step, m.meta.get("record") or {}) for m in scan.whole], self.keep)
        names = {_folder_name(manifest.serial, manifest.step) for manifest in scan.whole if manifest.serial in stay}
        names |= {path.name for path in scan.foreign}
        for path in self.root.iterdir():
            if _NAME.match(path.name) and path.name not in names:
                with _locked(path, fcntl.LOCK_EX) as unread:
                    if unread:
                        self._remove(path)
                    else:
                        logger.info("%s is being read: it stays until the next save", path)

    def _remove_unfinished(self) -> None:
        for path in self.root.iterdir():
            if path.name.startswith(_WRITING):
                logger.warning("removing unfinished checkpoint %s", path)
                shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _remove(folder: Path) -> None:
        # The manifest first: a removal that is interrupted leaves a torn checkpoint, never a wrong one.
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def reading(folder: Path) -> Iterator[Path]:
    """No save removes this checkpoint meanwhile. Raises `CorruptCheckpoint` when it is gone already."""
    with _locked(folder, fcntl.LOCK_SH) as held:
        if not held:
            raise CorruptCheckpoint(f"{folder} is being removed: a newer checkpoint has taken its place")
        _read(folder)
        yield folder


@contextmanager
def _locked(folder: Path, kind: int) -> Iterator[bool]:
    """With a lock on its manifest: false when somebody else has one that excludes it. One without a manifest is torn:
    nobody reads it."""
    try:
        descriptor = os.open(folder / MANIFEST_NAME, os.O_RDONLY)
    except FileNotFoundError:
        yield kind == fcntl.LOCK_EX
        return
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def _folder_name(serial: int, step: int) -> str:
    return f"ckpt-{serial:06d}-step-{step:08d}"


def _read(folder: Path) -> CheckpointManifest:
    """Raises `CorruptCheckpoint`, and `CheckpointSchemaError` for a manifest of another version."""
    try:
        text = (folder / MANIFEST_NAME).read_bytes()
        _check_version(folder, text)
        manifest = CheckpointManifest.model_validate_json(text)
    except FileNotFoundError:
        raise CorruptCheckpoint("it has no manifest: its save or its removal was interrupted") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptCheckpoint(f"its manifest cannot be read: {where}: {first['msg']}") from error
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CorruptCheckpoint(f"file {name} is missing")
        if (size := path.stat().st_size) != entry.n_bytes:
            raise CorruptCheckpoint(f"file {name} has {size} bytes, its manifest says {entry.n_bytes}")
    return manifest


def _check_version(folder: Path, text: bytes) -> None:
    try:
        body = json.loads(text)
    except ValueError:
        return  # torn: told by who reads on
    version = body.get("schema_version") if isinstance(body, dict) else None
    if isinstance(version, int) and version != SCHEMA_VERSION:
        raise CheckpointSchemaError(
            f"{folder} has schema version {version}, this program reads {SCHEMA_VERSION}: continue the run with the "
            "program that saved it, or move that folder away to go on from an older checkpoint"
        )


def _seal_files(folder: Path) -> dict[str, FileEntry]:
    """Digest and flush every file; flush every folder."""
    files: dict[str, FileEntry] = {}
    for path in sorted(folder.rglob("*")):
        _sync(path)
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = file_entry(path)
    return files


def _write_durably(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

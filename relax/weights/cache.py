"""Versions of a store on another node, pulled over TCP into this node's memory: once for all processes here.

    <root>/.lock                     held by the one that pulls
    <root>/v00000007/                whole and verified, as in the store: an engine adopts it by the same path
    <root>/.pull-<nonce>/            being pulled

Every user holds a shared lock on the folder. The last one removes it, and where all of them were killed, the next run's
first user does: locks of dead processes are gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import filelock

from relax.types import PolicyVersion
from relax.weights.manifest import VersionGone, read_manifest
from relax.weights.space import check_space
from relax.weights.store import ReadableVersion, version_folder
from relax.weights.tcp import TransferFailed, WeightSource, pull

logger = logging.getLogger(__name__)

SUFFIX = ".cache"
LOCK_DEADLINE_S = 10.0
_POLL_S = 0.02
_REMEDY = "lower dcs.keep_versions, or point dcs.shm_dir at a larger memory-backed folder"


class WeightCache:
    """`root` ends with `.cache` and lies in a memory-backed folder; the `keep` last used versions stay in it.

    Raises `TimeoutError` if the folder is being removed for longer than `LOCK_DEADLINE_S`.
    """

    def __init__(self, root: Path, keep: int, reserve_bytes: int = 0):
        if root.suffix != SUFFIX:
            raise ValueError(f"{root} must end with {SUFFIX}")
        self.root, self.keep, self.reserve_bytes = root, keep, reserve_bytes
        root.parent.mkdir(parents=True, exist_ok=True)
        for other in root.parent.glob(f"relax-*{SUFFIX}"):
            if other != root:
                _remove_unused(other)
        self._use = _join(root)

    def fetch(
        self,
        source: WeightSource,
        version: PolicyVersion,
        digest: str,
        deadline_s: float,
        *,
        on_retry: Callable[[str], None],
    ) -> Path:
        """The folder of a version, here. It is pulled unless it is here already, by whomever.

        Raises what `pull` raises, `CorruptWeights` when the bytes are not those of `digest`, `NoSpace`; nothing is
        left behind then, and what was here before stays.
        """
        ends = time.monotonic() + deadline_s
        try:
            with filelock.FileLock(self.root / ".lock", timeout=deadline_s):
                return self._fetch(source, version, digest, ends, on_retry)
        except filelock.Timeout as error:
            raise TransferFailed(
                "timeout", f"another process still pulled weights into {self.root} after {deadline_s:g} s"
            ) from error

    def _fetch(
        self, source: WeightSource, version: PolicyVersion, digest: str, ends: float, on_retry: Callable[[str], None]
    ) -> Path:
        target = version_folder(self.root, version)
        if not self._has(target, digest):
            for dead in self.root.glob(".pull-*"):  # its process died with the lock
                shutil.rmtree(dead, ignore_errors=True)
            partial = self.root / f".pull-{uuid.uuid4().hex[:12]}"
            partial.mkdir()
            try:
                pull(
                    source,
                    version,
                    digest,
                    partial,
                    ends - time.monotonic(),
                    on_retry=on_retry,
                    check_room=lambda n: check_space(f"weights v{version}", self.root, n, self.reserve_bytes, _REMEDY),
                )
                ReadableVersion(partial).verify()
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        os.utime(target)
        self._collect()
        return target

    def _has(self, target: Path, digest: str) -> bool:
        try:
            if read_manifest(target).digest == digest:
                return True
        except VersionGone:
            return False
        # One run never publishes a version twice: the folder is of an earlier life of the run.
        shutil.rmtree(target)
        return False

    def _collect(self) -> None:
        """The least lately used go: readers have mapped what they read, and it stays theirs."""
        versions = sorted(self.root.glob("v*"), key=lambda folder: folder.stat().st_mtime_ns)
        for folder in versions[: -self.keep]:
            shutil.rmtree(folder)

    def close(self) -> None:
        """Leave; the last user removes the folder."""
        os.close(self._use)
        _remove_unused(self.root)


def _join(root: Path) -> int:
    """A descriptor with a shared lock on the folder, which is made if missing."""
    end = time.monotonic() + LOCK_DEADLINE_S
    while time.monotonic() < end:
        root.mkdir(mode=0o700, exist_ok=True)
        try:
            handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino == root.stat().st_ino:  # not one that was removed meanwhile
                return handle
        os.close(handle)
        time.sleep(_POLL_S)
    raise TimeoutError(f"{root} was being removed for {LOCK_DEADLINE_S:g} s")


def _remove_unused(root: Path) -> None:
    """Remove a cache unless somebody uses it, or it is another user's."""
    try:
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, PermissionError):
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino == root.stat().st_ino:
            logger.info("removing %s, which nobody uses any more", root)
            trash = root.with_name(f"{root.stem}-{uuid.uuid4().hex[:12]}{SUFFIX}")  # found again should we die now
            root.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)
    except (BlockingIOError, FileNotFoundError):
        return
    finally:
        os.close(handle)

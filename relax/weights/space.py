"""Free space, looked at before it is needed (B47). Imports no torch."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from relax.types import RelaxError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_TEXTS = (
    os.strerror(errno.ENOSPC),
    os.strerror(errno.EDQUOT),
    # torch.save on a full disk names no errno: its archive is shorter than what it wrote.
    "] . unexpected pos ",
    "PytorchStreamWriter failed writing",
)


class NoSpace(RelaxError):
    """A disk or memory-backed folder is too full: says what is needed, what is free and what to do."""

    def __init__(self, what: str, folder: Path, need_bytes: int, free_bytes: int, reserve_bytes: int, remedy: str):
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes
        self.reserve_bytes = reserve_bytes
        super().__init__(
            f"no space for {what} in {folder}: needs {_mib(need_bytes)} and must leave {_mib(reserve_bytes)}, "
            f"free are {_mib(free_bytes)}; {remedy}"
        )


def free_bytes(folder: Path) -> int:
    """Bytes that an unprivileged process may still write on the filesystem of `folder`, which exists."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def check_space(what: str, folder: Path, need_bytes: int, reserve_bytes: int, remedy: str) -> None:
    """Raise `NoSpace` unless `need_bytes` fit and `reserve_bytes` stay free."""
    free = free_bytes(folder)
    if need_bytes + reserve_bytes > free:
        raise NoSpace(what, folder, need_bytes, free, reserve_bytes, remedy)


def ran_full(error: BaseException) -> bool:
    """Whether an error of a write means a full filesystem.

    Writers outside Python (torch archives, safetensors) report the errno in the text only.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return any(text in str(error) for text in _FULL_TEXTS)


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"

"""What made a dump: code and libraries, so that a replay elsewhere can say what is different."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import relax

LIBRARIES = ("torch", "transformers", "numpy", "safetensors")
PACKAGES = ("relax", "bus", "services")
GIT_DEADLINE_S = 10.0


@cache
def provenance() -> dict[str, str]:
    """`source`: digest of our Python files; `commit` where they lie in a git checkout; versions of the libraries."""
    root = Path(relax.__file__).parent.parent
    facts = {"source": source_digest(root), "python": platform.python_version(), "machine": platform.machine()}
    commit = _git_commit(root)
    if commit is not None:
        facts["commit"] = commit
    return facts | {name: importlib.metadata.version(name) for name in LIBRARIES}


def source_digest(root: Path) -> str:
    """Of the Python files of our packages under `root`, with their paths."""
    whole = hashlib.blake2b(digest_size=16)
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        text = path.read_bytes()
        whole.update(f"{path.relative_to(root).as_posix()}\0{len(text)}\0".encode())
        whole.update(text)
    return whole.hexdigest()


def differences(recorded: dict[str, str]) -> list[str]:
    """In words: what is not as it was when the dump was made."""
    own = provenance()
    return [
        f"{name}: {recorded.get(name, 'absent')} then, {own.get(name, 'absent')} now"
        for name in dict.fromkeys([*recorded, *own])
        if recorded.get(name) != own.get(name)
    ]


def _git_commit(root: Path) -> str | None:
    """None for an installed package and where there is no git: the digest of the source says enough."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    found = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=GIT_DEADLINE_S
    )
    return found.stdout.strip() if found.returncode == 0 else None

"""What the commands that look into run folders share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import overload

from relax.telemetry.run_folder import RunFolder, RunFolderError
from relax.types import RelaxError

RUN_FILES = ("run.json", "config.json", "metrics.jsonl", "samples.jsonl", "summary.json", "state.json")


class BadOption(RelaxError, ValueError):
    """An option of a command that cannot be meant; says what is possible."""


def existing_run(path: Path) -> RunFolder:
    """Raises `RunFolderError` where there is no run."""
    if not path.is_dir():
        raise RunFolderError(f"{path}: no such folder")
    if not any((path / name).exists() for name in RUN_FILES):
        raise RunFolderError(f"{path} is no run folder: it holds none of {', '.join(RUN_FILES)}")
    return RunFolder(path)


def step_range(text: str) -> tuple[int, int]:
    """`3` is one step, `3:5` are three, `3:` and `:5` are open at one end. Raises `BadOption`."""
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else 0
        high = (int(last) if last else 1 << 62) if colon else low
    except ValueError:
        raise BadOption(f"steps '{text}': expected a number or first:last, e.g. 3:5") from None
    if not text or low > high:
        raise BadOption(f"steps '{text}': expected a number or first:last, e.g. 3:5")
    return low, high


@overload
def known_name(option: str, word: str, known: Iterable[str]) -> str: ...
@overload
def known_name(option: str, word: None, known: Iterable[str]) -> None: ...
def known_name(option: str, word: str | None, known: Iterable[str]) -> str | None:
    """The word, where it is one of the known ones or None. Raises `BadOption`."""
    names = list(known)
    if word is not None and word not in names:
        raise BadOption(f"{option} {word}: {nearest(word, names)}")
    return word


def write_file(path: Path, text: str) -> None:
    """Raises `RunFolderError`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror or error}") from error


def nearest(word: str, known: Iterable[str]) -> str:
    """For an error message: the known name that was probably meant, or all of them."""
    names = sorted(set(known))
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}"

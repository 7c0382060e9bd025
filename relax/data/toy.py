"""Built-in tasks over short strings, which a model of 100k parameters learns in minutes.

`reverse`: "314>" wants "413". `copy`: "314>" wants "314". `sort`: "314>" wants "134".
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from relax.data.rows import Row, stable_seed, with_system
from relax.types import DataError, Json

END_MARK = ">"
"""Ends the question; the answer follows."""

TASKS: Mapping[str, Callable[[str], str]] = {
    "reverse": lambda payload: payload[::-1],
    "copy": lambda payload: payload,
    "sort": lambda payload: "".join(sorted(payload)),
}

HELD_OUT_SHARE = 8
"""One payload in this many belongs to the held-out part of the domain."""

MIN_SPLIT_DOMAIN = 100
"""Smallest domain that is split. A smaller one would leave too few payloads on one side."""

_CONTENT_STREAM = 1
"""Keeps a row's random words apart from those of the epoch order, which is seeded alike."""

_MOST_DRAWS = 2000
"""Draws for one payload; all fail with probability below (7/8)^2000 unless the part is empty."""


class ToyRows:
    """Rows of one toy task: row i is a function of (seed, i) alone, nothing is stored.

    `params`: `length` (symbols, default 3) and `alphabet` (default the ten digits).

    The domain (all payloads of that length) is split by a digest of the payload: one eighth is held
    out and drawn only with `held_out`, so that evaluation prompts never occur in training, whatever
    the seeds. A domain below `MIN_SPLIT_DOMAIN` payloads is not split: there training sees every
    payload anyway, and an evaluation measures what was trained.

    Payloads come from raw PCG64 words modulo the alphabet's size; NumPy keeps that bit stream
    stable over its versions, and the bias of the modulo is below 2^-50.
    """

    checked = False

    def __init__(
        self,
        task: str,
        params: Mapping[str, Any],
        size: int,
        seed: int,
        *,
        system_prompt: str | None = None,
        held_out: bool = False,
    ) -> None:
        if task not in TASKS:
            raise DataError(f"unknown toy task '{task}' in data.task: known are {', '.join(TASKS)}")
        self.name = task
        self._answer = TASKS[task]
        self._length, self._alphabet = _read_params(params)
        self._size = size
        self._seed = stable_seed(seed)
        self._system_prompt = system_prompt
        self._held_out = held_out
        self._split = len(self._alphabet) ** self._length >= MIN_SPLIT_DOMAIN

    def __len__(self) -> int:
        return self._size

    def row(self, position: int) -> Row:
        payload = self._payload(position)
        _, text = with_system(self._system_prompt, None, payload + END_MARK)
        return Row(position, f"toy task '{self.name}', prompt {position}", text=text, label=self._answer(payload))

    def identity(self) -> dict[str, Json]:
        return {
            "kind": "toy",
            "task": self.name,
            "length": self._length,
            "alphabet": self._alphabet,
            "size": self._size,
            "seed": self._seed,
            "system_prompt": self._system_prompt,
            "held_out": self._held_out,
        }

    def _payload(self, position: int) -> str:
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, position, _CONTENT_STREAM]))
        for _ in range(_MOST_DRAWS):
            words = bits.random_raw(self._length)
            payload = "".join(self._alphabet[int(w) % len(self._alphabet)] for w in words)
            if not self._split or is_held_out(payload) == self._held_out:
                return payload
        raise DataError(f"toy task '{self.name}': alphabet {self._alphabet!r} has no payload in the part that is drawn")


def is_held_out(payload: str) -> bool:
    """Whether a payload belongs to the held-out eighth of a split domain."""
    return hashlib.blake2b(payload.encode(), digest_size=1).digest()[0] % HELD_OUT_SHARE == 0


def _read_params(params: Mapping[str, Any]) -> tuple[int, str]:
    known = ("length", "alphabet")
    for key in params:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise DataError(
                f"unknown key '{key}' in data.params of a toy task: "
                + (f"did you mean '{near[0]}'?" if near else "known are length and alphabet")
            )
    length, alphabet = params.get("length", 3), params.get("alphabet", "0123456789")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise DataError(f"data.params.length must be a whole number of at least 1, not {length!r}")
    if not isinstance(alphabet, str) or len(alphabet) < 2 or len(set(alphabet)) != len(alphabet):
        raise DataError(f"data.params.alphabet must be a string of at least 2 different characters, not {alphabet!r}")
    if END_MARK in alphabet:
        raise DataError(f"data.params.alphabet may not contain '{END_MARK}': it ends the question")
    return length, alphabet

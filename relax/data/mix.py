"""Several sources as one: which is asked next is drawn by weight, reproducibly, with an exact cursor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relax.data.rows import digest_of, stable_seed
from relax.types import DataError, Prompt

_MIX_STREAM = 2
_SCHEMA = 1


class MixSource:
    """Draw n takes the source that the n-th number of a seeded stream falls to. A source that has ended is left out
    of the draws from then on; the mix ends when all have."""

    def __init__(self, name: str, sources: Sequence[Any], weights: Sequence[float], seed: int) -> None:
        """sources: `PromptSource`s. Raises `DataError` when two have one name: their group ids would collide."""
        names = [source.name for source in sources]
        for repeated in {n for n in names if names.count(n) > 1}:
            raise DataError(f"two sources of the mix are named '{repeated}': give one of them another data.name")
        self.name = name
        self._sources = list(sources)
        self._weights = np.asarray(weights, np.float64)
        self._seed = stable_seed(seed)
        self._draws = 0
        self._ended = [False] * len(sources)
        self._fingerprint = digest_of({"names": names, "weights": list(map(float, weights)), "seed": self._seed})

    def __len__(self) -> int:
        return sum(len(source) for source in self._sources)

    @property
    def skipped(self) -> int:
        return sum(source.skipped for source in self._sources)

    def next(self) -> Prompt | None:
        while not all(self._ended):
            index = self._pick()
            prompt: Prompt | None = self._sources[index].next()
            self._draws += 1
            if prompt is not None:
                return prompt
            self._ended[index] = True
        return None

    def _pick(self) -> int:
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, self._draws, _MIX_STREAM]))
        share = float(bits.random_raw()) / 2.0**64
        weights = np.where(self._ended, 0.0, self._weights)
        bounds = np.cumsum(weights) / weights.sum()
        return int(min(np.searchsorted(bounds, share, side="right"), np.flatnonzero(weights)[-1]))

    def state_dict(self) -> dict[str, Any]:
        return {
            "schema": _SCHEMA,
            "source": self.name,
            "fingerprint": self._fingerprint,
            "draws": self._draws,
            "ended": list(self._ended),
            "parts": [source.state_dict() for source in self._sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `DataError` when the cursor belongs to another mix, or a part's to another source."""
        if state.get("schema") != _SCHEMA or state.get("fingerprint") != self._fingerprint:
            raise DataError(
                f"the saved cursor belongs to mix '{state.get('source')}' ({state.get('fingerprint')}), not to this "
                f"'{self.name}' ({self._fingerprint}): its parts, weights or the seed changed since"
            )
        for source, part in zip(self._sources, state["parts"], strict=True):
            source.load_state_dict(part)
        self._draws, self._ended = int(state["draws"]), [bool(ended) for ended in state["ended"]]

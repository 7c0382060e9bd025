"""The fixed probe: tokens whose log-probs trainer and engines compute after every publication."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relax.data.tokenizer import Tokenizer
from relax.types import DataError

ROWS, LENGTH = 4, 16
TEXT = (
    "The river runs past the old mill and under the stone bridge, where two children count the boats. "
    "They have seen seven in the morning and five in the afternoon, so that makes twelve. "
    "Their mother calls them home for supper, and they promise each other to come back tomorrow."
)
"""Ordinary prose: on likely tokens a difference of arithmetic is small, and one of weights is not."""


def probe_tokens(tokenizer: Tokenizer, max_tokens: int, seed: int) -> npt.NDArray[np.int64]:
    """int64 [ROWS, L]. Random tokens where the tokenizer cannot write the text (a character model)."""
    length = min(LENGTH, max_tokens - 1)
    try:
        ids = np.array(tokenizer.encode(TEXT)[: ROWS * length], dtype=np.int64)
    except DataError:
        ids = np.random.default_rng(seed).integers(0, tokenizer.vocab_size, ROWS * length)
    rows = max(1, min(ROWS, len(ids) // length))
    return ids[: rows * length].reshape(rows, length)

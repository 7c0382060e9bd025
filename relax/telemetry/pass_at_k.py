"""pass@k: the chance that one of k answers is right."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import comb


def pass_at_k(right: Sequence[int], samples: int) -> dict[int, float]:
    """k -> mean over prompts, for k = 1, 2, 4 ... up to `samples` answers, of which `right` were right per prompt.

    Unbiased: 1 - C(n - c, k) / C(n, k) for c right of n answers (Chen et al., arXiv 2107.03374, eq. 1).
    """
    ks = [1 << power for power in range(samples.bit_length()) if 1 << power <= samples]
    return {k: statistics.fmean(1 - comb(samples - c, k) / comb(samples, k) for c in right) for k in ks}

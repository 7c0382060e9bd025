"""Discounted returns and generalised advantage estimation over the sampled tokens of one row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relax.types import FloatArray

Float64Array = npt.NDArray[np.float64]


def returns_to_go(rewards: Float64Array, gamma: float) -> Float64Array:
    """G_t = r_t + gamma G_{t+1} over N sampled tokens; float64 [N]."""
    out = np.empty(len(rewards))
    following = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        following = out[t] = rewards[t] + gamma * following
    return out


def gae(rewards: Float64Array, values: FloatArray, gamma: float, lam: float) -> tuple[Float64Array, Float64Array]:
    """Advantages and returns, float64 [N] each, over the N sampled tokens of one row.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; R_t = A_t + V_t, with V = 0 after
    the last token (arXiv 1506.02438, eq. 12 and 16). values: [N], V_t before token t is drawn.
    """
    current = values.astype(np.float64)
    deltas = rewards + gamma * np.append(current[1:], 0.0) - current
    advantages = returns_to_go(deltas, gamma * lam)
    return advantages, advantages + current

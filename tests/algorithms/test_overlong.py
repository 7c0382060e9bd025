from __future__ import annotations

import pytest

from relax.algorithms.overlong import soft_overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    # Limit 20, buffer 8: 0 up to 12, then (12 - length) / 8, and -1 from 20 on; times the penalty 2.
    [(0, 0.0), (12, 0.0), (13, -0.25), (16, -1.0), (20, -2.0), (25, -2.0)],
)
def test_soft_overlong_penalty_golden(length: int, expected: float) -> None:
    """behaviour: B27."""
    assert soft_overlong_penalty(length, max_tokens=20, buffer_tokens=8, penalty=2.0) == expected


@pytest.mark.parametrize("buffer_tokens", [0, 21])
def test_a_buffer_outside_the_limit_is_refused(buffer_tokens: int) -> None:
    """behaviour: B27."""
    with pytest.raises(ValueError, match="buffer"):
        soft_overlong_penalty(10, max_tokens=20, buffer_tokens=buffer_tokens)

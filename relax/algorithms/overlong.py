"""Length penalty."""

from __future__ import annotations


def soft_overlong_penalty(response_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> float:
    """Addend to the reward, in [-penalty, 0]: 0 up to max - buffer, then falling linearly to -penalty at max.

    Soft overlong punishment: DAPO, arXiv 2503.14476, eq. 13, times `penalty`. Raises `ValueError` unless
    1 <= buffer_tokens <= max_tokens.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"the overlong buffer ({buffer_tokens}) must be within the response limit ({max_tokens})")
    excess = response_tokens - (max_tokens - buffer_tokens)
    return -penalty * min(max(excess / buffer_tokens, 0.0), 1.0)

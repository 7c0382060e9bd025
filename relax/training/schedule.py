"""Learning-rate schedules."""

from __future__ import annotations

import math

from relax.config.actor import OptimConfig


def learning_rate(config: OptimConfig, update: int, total_updates: int) -> float:
    """Of the update with this 0-based index.

    Linear warm-up over `warmup_steps` (the first update has lr / warmup_steps, never 0), then the decay,
    which reaches lr x min_lr_ratio at the last update and stays there.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    span = total_updates - 1 - config.warmup_steps
    progress = min((update - config.warmup_steps) / span, 1.0) if span > 0 else 1.0
    match config.schedule:
        case "constant":
            return config.lr
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = (1.0 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)

from __future__ import annotations

import pytest

from relax.config.actor import OptimConfig
from relax.training.schedule import learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    # Peak 1, two warm-up updates of seven, floor 0.2: warm-up 1/2, 1; then 4 steps from 1 down to 0.2.
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        # (1 + cos(pi x)) / 2 at x = 0, 1/4, 1/2, 3/4, 1: 1, 0.853553, 0.5, 0.146447, 0; times 0.8 plus 0.2.
        ("cosine", [0.5, 1, 1, 0.882843, 0.6, 0.317157, 0.2, 0.2]),
    ],
)
def test_schedules_golden(schedule: str, expected: list[float]) -> None:
    """behaviour: B27. The eighth update is past the end: the rate stays at the floor."""
    config = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=2, min_lr_ratio=0.2)
    assert [learning_rate(config, update, 7) for update in range(8)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("total", [1, 2])
def test_a_run_no_longer_than_its_warm_up_has_a_rate(total: int) -> None:
    """behaviour: B27."""
    config = OptimConfig(lr=1.0, schedule="linear", warmup_steps=1, min_lr_ratio=0.2)
    assert learning_rate(config, 0, total) == 1.0
    assert learning_rate(config, 1, total) == pytest.approx(0.2)

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from relax.algorithms import ModeMismatch, check_batch_mode
from relax.types import LogprobMode, SamplingParams


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": math.nan},
        {"top_p": 0.95},
        {"top_k": 50},
        {"logprob_mode": LogprobMode.SAMPLING},
    ],
)
def test_a_row_of_another_sampling_mode_is_refused_by_name(change: dict[str, Any]) -> None:
    """behaviour: B7."""
    good = SamplingParams(temperature=0.7, seed=1)
    rows = [("g/0/0", good), ("g/1/0", replace(good, **change))]
    with pytest.raises(ModeMismatch, match=f"g/1/0.*{next(iter(change))}"):
        check_batch_mode(rows)


def test_rows_of_several_temperatures_are_accepted() -> None:
    """behaviour: B7. The trainer computes each row at its own temperature."""
    check_batch_mode([("g/0/0", SamplingParams(temperature=0.7)), ("g/1/0", SamplingParams(temperature=1.3))])


def test_a_process_that_only_scores_does_not_load_torch() -> None:
    """The reward role uses the length penalty and need not pay for torch."""
    code = (
        "import sys; from relax.algorithms.overlong import soft_overlong_penalty; "
        "import relax.algorithms; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

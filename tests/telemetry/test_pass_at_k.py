from __future__ import annotations

import itertools
import statistics

import pytest

from relax.telemetry.pass_at_k import pass_at_k


def test_golden() -> None:
    """1 of 4 right: pass@1 1/4, pass@2 1 - C(3,2)/C(4,2) = 1/2, pass@4 1; none right: 0; all right: 1."""
    assert pass_at_k([1], 4) == pytest.approx({1: 0.25, 2: 0.5, 4: 1.0})
    assert pass_at_k([0, 4], 4) == pytest.approx({1: 0.5, 2: 0.5, 4: 0.5})
    assert pass_at_k([1], 1) == {1: 1.0}
    assert list(pass_at_k([2], 6)) == [1, 2, 4]


@pytest.mark.parametrize(("right", "samples"), [(2, 5), (3, 8), (1, 3)])
def test_it_is_the_share_of_subsets_with_a_right_answer(right: int, samples: int) -> None:
    answers = [1] * right + [0] * (samples - right)
    for k, value in pass_at_k([right], samples).items():
        subsets = list(itertools.combinations(answers, k))
        assert value == pytest.approx(statistics.fmean(float(any(subset)) for subset in subsets))

from __future__ import annotations

import math

import pytest
import torch

from relax.algorithms.kl import kl_estimate


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    # policy 0.5, reference 0.25: r = 1/2, log r = -ln 2 = -0.693147.
    [
        ("k1", 0.693147, 1.0),  # -log r; slope d/dlogprob = 1
        ("k2", 0.240227, 0.693147),  # 0.693147^2 / 2; slope -log r
        ("k3", 0.193147, 0.5),  # 1/2 - 1 + 0.693147; slope 1 - r
    ],
)
def test_kl_estimators_golden(estimator: str, value: float, slope: float) -> None:
    """behaviour: B27."""
    policy = torch.tensor([math.log(0.5)], requires_grad=True)
    estimate = kl_estimate(estimator, policy, torch.tensor([math.log(0.25)]))  # type: ignore[arg-type]
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value, abs=1e-6)
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl(estimator: str) -> None:
    """behaviour: B27. Policy (1/2, 1/2), reference (1/4, 3/4): KL = ln(2)/2 + ln(2/3)/2 = 0.143841."""
    policy, ref = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    mean = (policy.exp() * kl_estimate(estimator, policy, ref)).sum()  # type: ignore[arg-type]
    assert mean.item() == pytest.approx(0.143841, abs=1e-6)

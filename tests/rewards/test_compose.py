from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.rewards.base import RewardConfigError, RewardRequest
from relax.rewards.compose import Part, RewardSpec, build_spec, combine, finite_number, score
from relax.types import FinishReason, Prompt, RewardState


def request(text: str = "12", tokens: int = 2) -> RewardRequest:
    prompt = Prompt("toy", 0, 0, text="1+1", label="12")
    return RewardRequest.of(prompt, text, FinishReason.STOP, tokens)


def spec_returning(*values: Any) -> RewardSpec:
    def constant(value: Any) -> Any:
        def f(*_: Any) -> Any:
            if isinstance(value, BaseException):
                raise value
            return value

        return f

    return RewardSpec(tuple(Part(f"part{i}", f"part{i}", 1.0, constant(v)) for i, v in enumerate(values)))


def test_the_reward_is_the_weighted_sum_and_the_accuracy_the_first_raw_value() -> None:
    result = combine([2.0, 0.5], {"exact": 1.0, "format": 0.5}, None)
    assert result.reward == 2.25
    assert result.accuracy == 1.0
    assert result.parts == {"exact": 1.0, "format": 0.5}
    assert result.state is RewardState.OK


class BrokenRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (np.float32("nan"), "nan"),
        ("1.0", "'1.0'"),
        (None, "None"),
        ([1.0], "list"),
        (1j, "complex"),
        (10**400, "int"),
        (BrokenRepr(), "BrokenRepr"),
        (ValueError("what I said"), "ValueError: what I said"),
        (SystemExit(0), "SystemExit"),
    ],
)
def test_a_part_without_a_finite_number_fails_the_scoring_and_is_named(value: Any, shown: str) -> None:
    """behaviour: B20"""
    result = score(spec_returning(0.5, value), request())
    assert result.state is RewardState.FAILED
    assert result.reward is None and result.accuracy is None
    assert result.parts == {"part0": 0.5}
    assert result.error is not None and "'part1'" in result.error and shown in result.error


@pytest.mark.parametrize("value", [1, True, 1.0, np.float64(1), np.int32(1), np.bool_(True)])
def test_every_real_number_is_a_reward(value: Any) -> None:
    assert finite_number(value) == 1.0


def test_a_memory_error_is_not_taken_for_a_failed_reward() -> None:
    """behaviour: B19"""
    with pytest.raises(MemoryError):
        score(spec_returning(MemoryError()), request())


def test_weights_that_overflow_fail_the_scoring() -> None:
    """behaviour: B20"""
    assert combine([1e308, 1e308], {"a": 1.0, "b": 1.0}, None).state is RewardState.FAILED


def test_a_repeated_part_keeps_both_values() -> None:
    parts = [{"name": "format", "weight": 1.0, "params": {"pattern": p}} for p in ("1.", "2.")]
    result = score(build_spec({"parts": parts}, Path()), request("12"))
    assert result.parts == {"format": 1.0, "format#2": 0.0}


@pytest.mark.parametrize(("tokens", "penalty"), [(6, 0.0), (8, -1.0), (10, -2.0)])
def test_the_overlong_penalty_lowers_the_reward_but_not_the_accuracy(tokens: int, penalty: float) -> None:
    data = {
        "parts": [{"name": "exact", "weight": 1.0, "params": {}}],
        "overlong": {"max_tokens": 10, "buffer_tokens": 4, "penalty": 2.0},
    }
    result = score(build_spec(data, Path()), request("12", tokens))
    assert result.reward == 1.0 + penalty
    assert result.accuracy == 1.0
    assert result.parts["overlong"] == penalty


def test_an_overlong_buffer_beyond_the_limit_is_refused_at_the_start() -> None:
    data = {"parts": [], "overlong": {"max_tokens": 4, "buffer_tokens": 5, "penalty": 1.0}}
    with pytest.raises(RewardConfigError, match="buffer"):
        build_spec(data, Path())


def test_request_and_result_survive_json() -> None:
    asked = request()
    again = RewardRequest.from_json(asked.to_json())
    assert again.to_json() == asked.to_json()
    result = combine([1.0], {"exact": 1.0}, None)
    assert type(result).from_json(result.to_json()) == result

"""From the values of the parts to one reward. A value that is no finite number fails the scoring (B20)."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.rewards.base import RewardConfigError, RewardRequest, RewardResult
from relax.rewards.functions import RewardFunction, resolve
from relax.types import Json, Prompt, RewardState

ERROR_CHARS = 500
"""Longest error text that travels with a result."""


@dataclass(frozen=True, slots=True)
class Part:
    """A resolved part; `name` is unique among the parts of one reward, `spec` is what the configuration says."""

    name: str
    spec: str
    weight: float
    function: RewardFunction


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """The whole reward: `score(spec, request)` evaluates it."""

    parts: tuple[Part, ...]
    overlong: Callable[[int], float] | None = None
    """From response tokens to the (negative) addend; None is off."""


def build_spec(data: Mapping[str, Json], base: Path) -> RewardSpec:
    """Resolve `{"parts": [{name, weight, params}], "overlong": {max_tokens, buffer_tokens, penalty} | null}`.

    An own function goes by its name without the path; a name used twice is told apart as `name#2`.

    Raises:
        RewardConfigError: a part or an overlong section that cannot be used.
    """
    parts: list[Part] = []
    for part in data["parts"]:
        function = resolve(part["name"], part["params"], base)
        name = part["name"].rpartition(":")[2]
        repeats = sum(known.name.split("#")[0] == name for known in parts)
        parts.append(Part(name + (f"#{repeats + 1}" if repeats else ""), part["name"], part["weight"], function))
    overlong = data.get("overlong")
    return RewardSpec(tuple(parts), None if overlong is None else _overlong(overlong))


def score(spec: RewardSpec, request: RewardRequest) -> RewardResult:
    """Evaluate all parts; the reward is their weighted sum plus the (negative) overlong penalty.

    The accuracy is the raw value of the first part. The first part that raises, or returns something that
    is no finite number, ends the scoring in state FAILED. `MemoryError` passes through: after one the
    process is not to be trusted.
    """
    prompt = request.prompt.to_json() if isinstance(request.prompt, Prompt) else request.prompt
    values: dict[str, float] = {}
    for part in spec.parts:
        try:
            returned = part.function(request.response_text, request.label, request.metadata, prompt)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # user code: whatever it raises is recorded in the result
            return _failed(f"reward part {part.spec!r} raised {type(error).__name__}: {_text(str, error)}", values)
        value = finite_number(returned)
        if value is None:
            return _failed(f"reward part {part.spec!r} returned {_show(returned)}, which is no finite number", values)
        values[part.name] = value
    penalty = None if spec.overlong is None else spec.overlong(request.n_response_tokens)
    return combine([part.weight for part in spec.parts], values, penalty)


def combine(weights: Sequence[float], values: Mapping[str, float], penalty: float | None) -> RewardResult:
    """The weighted sum of the values in order, plus the overlong penalty (at most 0; None is off)."""
    reward = sum(weight * value for weight, value in zip(weights, values.values(), strict=True))
    parts = dict(values)
    if penalty is not None:
        parts["overlong"] = penalty
        reward += penalty
    if not math.isfinite(reward):
        return _failed(f"the weighted sum of {parts} is {reward}", parts)
    return RewardResult(reward, next(iter(values.values())), parts, RewardState.OK)


def finite_number(value: Any) -> float | None:
    """The value as a float if it is a finite real number (bool and NumPy scalars included), else None."""
    if not isinstance(value, numbers.Real) and type(value).__name__ not in {"bool_", "bool"}:
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError, TypeError):
        return None
    return number if math.isfinite(number) else None


def _overlong(data: Mapping[str, Json]) -> Callable[[int], float]:
    from relax.algorithms.overlong import soft_overlong_penalty

    def penalty(n_response_tokens: int) -> float:
        return soft_overlong_penalty(n_response_tokens, data["max_tokens"], data["buffer_tokens"], data["penalty"])

    try:
        penalty(0)
    except ValueError as error:
        raise RewardConfigError(str(error)) from error
    return penalty


def _show(value: Any) -> str:
    return f"{_text(repr, value)[: ERROR_CHARS // 2]} ({type(value).__name__})"


def _text(convert: Callable[[Any], str], value: Any) -> str:
    try:
        return convert(value)
    except Exception as error:  # user code again: a broken __repr__ must not hide the fault that it describes
        return f"<{convert.__name__} raised {type(error).__name__}>"


def _failed(error: str, parts: Mapping[str, float]) -> RewardResult:
    return RewardResult.failure(RewardState.FAILED, error[:ERROR_CHARS], dict(parts))

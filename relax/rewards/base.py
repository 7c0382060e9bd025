"""The request and the result of one scoring, and the errors of this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relax.types import FinishReason, Json, Prompt, RelaxError, RewardState


class RewardConfigError(RelaxError, ValueError):
    """A part names a function that does not exist, or gives it parameters that it does not take."""


class RewardFunctionError(RelaxError, ValueError):
    """A scorer cannot judge this sample: a missing label, a gold answer that does not parse."""


class RewardPoolError(RelaxError, RuntimeError):
    """The pool cannot score any more: it is closed, or its workers do not start."""


TRAJECTORY = "trajectory"
"""Key in a reward's metadata: what the rollout worker said of the sample."""


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """One response to score.

    `prompt` is a `Prompt` or its JSON; a function that has a `prompt` parameter gets the JSON.
    `n_response_tokens` counts sampled tokens; the overlong penalty reads it.
    """

    prompt: Prompt | Mapping[str, Json]
    response_text: str
    label: Json = None
    metadata: Mapping[str, Json] = field(default_factory=dict)
    finish_reason: FinishReason = FinishReason.STOP
    n_response_tokens: int = 0

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        response_text: str,
        finish_reason: FinishReason,
        n_response_tokens: int,
        trajectory: Mapping[str, Json] | None = None,
    ) -> RewardRequest:
        """A request with the label and metadata of its prompt, and what the worker said of its trajectory under the
        key `trajectory`."""
        metadata = {**prompt.metadata, TRAJECTORY: dict(trajectory)} if trajectory else prompt.metadata
        return cls(prompt, response_text, prompt.label, metadata, finish_reason, n_response_tokens)

    def to_json(self) -> dict[str, Json]:
        return {
            "prompt": self.prompt.to_json() if isinstance(self.prompt, Prompt) else dict(self.prompt),
            "response_text": self.response_text,
            "label": self.label,
            "metadata": dict(self.metadata),
            "finish_reason": self.finish_reason.value,
            "n_response_tokens": self.n_response_tokens,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> RewardRequest:
        return cls(**{**data, "finish_reason": FinishReason(data["finish_reason"])})


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What came of one scoring.

    `reward` and `accuracy` are finite numbers exactly when `state` is OK, else None (B20).
    `parts` maps each part to its raw value before weighting, and "overlong" to the penalty added;
    of a failed scoring it holds the parts that had succeeded. `error` says what went wrong.
    """

    reward: float | None
    accuracy: float | None
    parts: Mapping[str, float]
    state: RewardState
    error: str | None = None

    @classmethod
    def failure(cls, state: RewardState, error: str, parts: Mapping[str, float] | None = None) -> RewardResult:
        return cls(None, None, parts or {}, state, error)

    def to_json(self) -> dict[str, Json]:
        return {
            "reward": self.reward,
            "accuracy": self.accuracy,
            "parts": dict(self.parts),
            "state": self.state.value,
            "error": self.error,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> RewardResult:
        return cls(**{**data, "state": RewardState(data["state"])})

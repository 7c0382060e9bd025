"""The vocabulary shared by every package: identifiers, versions, samples, trajectories.

Arrays are NumPy here, so that this module (and the bus, which may import nothing else of
`relax`) loads without torch. Shapes use T for the number of tokens of one row: prompt and
response together, in order.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

PolicyVersion = NewType("PolicyVersion", int)
"""Counts publications of the policy. Only grows, over restarts and rollbacks too. 0 is the initial policy."""

GroupId = NewType("GroupId", str)
"""Unique in a run: `<source>:<epoch>:<index>`. All samples of one prompt share it."""

SampleId = NewType("SampleId", str)
"""`<group_id>/<k>`, k in [0, group_size)."""

RowId = NewType("RowId", str)
"""`<group_id>/<k>/<segment>`: one training row. A trajectory that was not split has segment 0 only."""

NO_VERSION = PolicyVersion(-1)
"""In `versions`: the token was not sampled by the policy (prompt, tool output)."""

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Json = Any
"""A JSON value: what `json.dumps` accepts without a default."""


def make_group_id(source: str, epoch: int, index: int) -> GroupId:
    return GroupId(f"{source}:{epoch}:{index}")


def make_sample_id(group_id: GroupId, k: int) -> SampleId:
    return SampleId(f"{group_id}/{k}")


def make_row_id(group_id: GroupId, k: int, segment: int = 0) -> RowId:
    return RowId(f"{group_id}/{k}/{segment}")


def group_of(row_or_sample_id: str) -> GroupId:
    """The group of a sample or row id. Group ids never contain a slash."""
    return GroupId(row_or_sample_id.split("/", 1)[0])


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """An end token or a stop string."""
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RewardState(enum.StrEnum):
    OK = "ok"
    FAILED = "failed"
    """The function raised, or returned NaN, a string or nothing. Never a silent 0 (B20)."""
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    """The worker process died (interpreter crash, memory limit)."""


class LogprobMode(enum.StrEnum):
    """What `rollout_logprobs` means. z are the logits, t the temperature."""

    TEMPERATURE = "temperature"
    """log_softmax(z / t), before top-p and top-k. What the trainer computes too."""
    SAMPLING = "sampling"
    """log of the distribution that was sampled: after temperature, top-k and top-p, renormalised."""


class Purpose(enum.StrEnum):
    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Per request. Recorded with each sample (B7).

    `temperature` 0 means greedy; log-probs are then those at temperature 1.
    `top_k` -1 means off. `seed` makes the draw a function of (seed, position) alone, whatever
    the batch-mates.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprob_mode: LogprobMode = LogprobMode.TEMPERATURE

    def to_json(self) -> dict[str, Json]:
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": self.max_new_tokens,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "seed": self.seed,
            "logprob_mode": self.logprob_mode.value,
        }

    @classmethod
    def from_json(cls, data: dict[str, Json]) -> SamplingParams:
        return cls(
            **{
                **data,
                "stop": tuple(data.get("stop", ())),
                "stop_token_ids": tuple(data.get("stop_token_ids", ())),
                "logprob_mode": LogprobMode(data.get("logprob_mode", LogprobMode.TEMPERATURE)),
            }
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task instance, before tokenisation.

    Exactly one of `messages` (chat, each {"role", "content"}) and `text` is set. `label` is what a
    reward compares with; `metadata` goes to the reward and the worker untouched.
    """

    source: str
    epoch: int
    index: int
    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None
    label: Json = None
    metadata: dict[str, Json] = field(default_factory=dict)

    @property
    def group_id(self) -> GroupId:
        return make_group_id(self.source, self.epoch, self.index)

    def to_json(self) -> dict[str, Json]:
        return {
            "source": self.source,
            "epoch": self.epoch,
            "index": self.index,
            "messages": None if self.messages is None else list(self.messages),
            "text": self.text,
            "label": self.label,
            "metadata": self.metadata,
        }

    @classmethod
    def from_json(cls, data: dict[str, Json]) -> Prompt:
        messages = data.get("messages")
        return cls(**{**data, "messages": None if messages is None else tuple(messages)})


@dataclass(frozen=True, slots=True)
class DataItem:
    """What a `RolloutWorker.step` gets: one sample to produce.

    `prompt_tokens` is the rendered prompt (chat template applied, special tokens included).
    """

    prompt: Prompt
    sample_index: int
    group_size: int
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams

    @property
    def sample_id(self) -> SampleId:
        return make_sample_id(self.prompt.group_id, self.sample_index)


@dataclass(slots=True)
class Trajectory:
    """What a `RolloutWorker.step` returns: one finished sample.

    tokens: int32 [T]; loss_mask: bool [T], true exactly on sampled tokens, the end token included;
    rollout_logprobs: float32 [T], 0 where not sampled; versions: int32 [T], -1 where not sampled,
    never decreasing over the sampled tokens. Lengths are equal (B23).
    """

    tokens: IntArray
    loss_mask: BoolArray
    rollout_logprobs: FloatArray
    versions: IntArray
    sampling: SamplingParams
    finish_reason: FinishReason
    metadata: dict[str, Json] = field(default_factory=dict)

    def validate(self) -> None:
        """Raise `MalformedTrajectory` unless lengths, masks and versions agree (B9, B23)."""
        lengths = {
            "tokens": len(self.tokens),
            "loss_mask": len(self.loss_mask),
            "rollout_logprobs": len(self.rollout_logprobs),
            "versions": len(self.versions),
        }
        if len(set(lengths.values())) != 1:
            raise MalformedTrajectory(f"unequal lengths: {lengths}")
        some = np.count_nonzero  # of several ways to ask, by far the cheapest on short samples
        given = ~self.loss_mask
        sampled = self.versions[self.loss_mask]
        if not len(sampled):
            raise MalformedTrajectory("no sampled token: loss_mask is all false")
        if some(sampled < 0):
            raise MalformedTrajectory("a sampled token carries no policy version")
        if some(self.versions[given] != NO_VERSION):
            raise MalformedTrajectory("a token that was not sampled carries a policy version")
        if some(sampled[1:] < sampled[:-1]):
            raise MalformedTrajectory(f"versions decrease within a sample: {sampled.tolist()}")
        if some(np.isfinite(self.rollout_logprobs)) != len(self.rollout_logprobs):
            raise MalformedTrajectory("non-finite behaviour log-prob")
        if some(self.rollout_logprobs[given]):
            raise MalformedTrajectory("a token that was not sampled carries a log-prob")


class RelaxError(Exception):
    """Base of the errors that this project raises on purpose. They travel between processes as they are,
    whatever their constructors take."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored_error, (type(self), self.args, self.__dict__)


def _restored_error(kind: type[RelaxError], args: tuple[Any, ...], attributes: dict[str, Any]) -> RelaxError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class MalformedTrajectory(RelaxError, ValueError):
    """A trajectory breaks the record contract; the message says which part and how."""


class DataError(RelaxError, ValueError):
    """Bad input data: says the file, the line and what to do."""


class ModelError(RelaxError, ValueError):
    """A model folder or tokenizer that cannot be used: says which file and why."""

"""Bodies of the SGLang protocol (0.5.23, the subset that the embedded engine serves) and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from relax.engines.embedded import BadRequest, PauseMode
from relax.engines.requests import Output, Request
from relax.engines.status import version_text
from relax.engines.stop_strings import DecodesTokens, visible_text
from relax.types import FinishReason, IntArray, Json, PolicyVersion, SamplingParams

B = TypeVar("B", bound="_Body")


class _Body(BaseModel):
    """A field that this engine does not implement is accepted at its neutral value only."""

    model_config = ConfigDict(extra="forbid", strict=False)

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, data: Any) -> Any:
        neutral = cls._neutral_values()
        if not neutral or not isinstance(data, dict) or neutral.keys().isdisjoint(data):
            return data
        for name in neutral.keys() & data.keys():
            if data[name] not in neutral[name]:
                raise ValueError(f"{name} is not supported by the embedded engine")
        return {name: value for name, value in data.items() if name not in neutral}

    @classmethod
    def _neutral_values(cls) -> Mapping[str, tuple[Any, ...]]:
        return {}


_SAMPLING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_p": (None, 0),
    "min_new_tokens": (None, 0),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True, False),
    "no_stop_trim": (None, False),
    "repetition_penalty": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
}
_GENERATE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "text": (None,),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
    "return_text_in_logprobs": (None, False),
    "sampling_logprobs_mode": (None, "selected"),
    "return_routed_experts": (None, False),
    "routed_experts_start_len": (None, 0),
    "return_hidden_states": (None, False),
    "session_id": (None,),
    "priority": (None, 0),
    "extra_key": (None,),
    "lora_path": (None,),
    "image_data": (None, []),
}


class SamplingBody(_Body):
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1)] = 1
    sampling_seed: int | None = None

    @classmethod
    def _neutral_values(cls) -> Mapping[str, tuple[Any, ...]]:
        return _SAMPLING_NEUTRAL

    def params(self) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stop:
            raise BadRequest("stop holds an empty string")
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_new_tokens=self.max_new_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            seed=self.sampling_seed,
        )


class GenerateBody(_Body):
    input_ids: list[int] | list[list[int]]
    rid: str | list[str] | None = None
    sampling_params: SamplingBody | list[SamplingBody] = SamplingBody()
    return_logprob: bool = False
    logprob_start_len: Literal[-1, 0] | None = None
    """0: score the prompt too (`input_token_logprobs`, at temperature 1, the first null)."""
    return_sampling_mask: bool = False
    stream: bool = False

    @classmethod
    def _neutral_values(cls) -> Mapping[str, tuple[Any, ...]]:
        return _GENERATE_NEUTRAL


class AbortBody(_Body):
    rid: str | None = None
    abort_all: bool = False


class PauseBody(_Body):
    mode: PauseMode = PauseMode.ABORT


class ContinueBody(_Body):
    torch_empty_cache: bool = True


class UpdateFromDiskBody(_Body):
    """`deadline_s` is ours: SGLang has none."""

    model_path: str
    weight_version: Annotated[str | int, Field(union_mode="left_to_right")]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    deadline_s: Annotated[float, Field(gt=0)] = 60.0

    def version(self) -> PolicyVersion:
        try:
            version = int(self.weight_version)
        except ValueError:
            version = -1
        if version < 0:
            raise BadRequest(f"weight_version must be a policy version (an integer from 0), is {self.weight_version!r}")
        return PolicyVersion(version)


class CheckerBody(_Body):
    action: Literal["checksum"]


class SessionBody(_Body):
    selector: str = "all"


def parse(kind: type[B], body: Json) -> B:
    """Raises `BadRequest` that names the first wrong field."""
    try:
        return kind.model_validate({} if body is None else body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{where}: {first['msg']}" if where else str(first["msg"])) from error


def error_body(message: str, code: int) -> Json:
    kind = "invalid_request_error" if code == 400 else "engine_error"
    return {"error": {"message": message, "type": kind, "code": code}}


def version_spans(versions: IntArray) -> list[dict[str, Json]]:
    """[start, end) of each run of one version over the generated tokens."""
    if not len(versions):
        return []
    if versions[0] == versions[-1]:  # nearly always: they never decrease
        return [{"version": version_text(PolicyVersion(int(versions[0]))), "start": 0, "end": len(versions)}]
    cuts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist(), len(versions)]
    return [
        {"version": version_text(PolicyVersion(int(versions[start]))), "start": start, "end": end}
        for start, end in pairwise(cuts)
    ]


def _finish_body(output: Output) -> Json:
    match output.finish:
        case None:
            return None
        case FinishReason.STOP:
            return {"type": "stop", "matched": output.matched}
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(output.output_ids)}
        case _:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def answer(
    request: Request, output: Output, body: GenerateBody, tokenizer: DecodesTokens, version: PolicyVersion, now_s: float
) -> dict[str, Json]:
    """The body for one sequence, final or (in a stream) so far."""
    ids = output.output_ids.tolist()
    meta: dict[str, Json] = {
        "id": request.request_id,
        "finish_reason": _finish_body(output),
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": version_text(PolicyVersion(int(output.versions[-1])) if ids else version),
        "weight_versions": version_spans(output.versions),
        "num_retractions": request.retractions,
        "e2e_latency": now_s - request.created_s,
        "queue_time": (now_s if request.started_s is None else request.started_s) - request.created_s,
    }
    if body.return_logprob:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[lp, i, None] for lp, i in zip(output.logprobs.tolist(), ids, strict=True)]
        meta["output_token_logprobs_length"] = len(ids)
    if body.return_sampling_mask:
        meta["output_token_sampling_logprobs"] = output.sampling_logprobs.tolist()
    return {"text": visible_text(ids, tokenizer, output.matched), "output_ids": ids, "meta_info": meta}

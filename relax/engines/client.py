"""The one client of the SGLang protocol, for the embedded engine and for SGLang 0.5.23 itself."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from relax.engines.base import EngineError, Generation, Transport, WeightReport
from relax.types import (
    NO_VERSION,
    FinishReason,
    FloatArray,
    IntArray,
    Json,
    LogprobMode,
    PolicyVersion,
    SamplingParams,
)

logger = logging.getLogger(__name__)
_ENGINE_SHARE = 0.95
"""Part of a deadline that the engine itself gets, so that its own error text arrives before the transport gives up."""


class SglangClient:
    """Implements `EngineClient`. Safe for concurrent calls on one event loop. Owns its transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._in_flight_update: bool | None = None

    async def generate(
        self, input_ids: IntArray, sampling: SamplingParams, *, request_id: str, deadline_s: float
    ) -> Generation:
        """Raises `EngineError` with the engine's text, `TimeoutError` past the deadline (the request is aborted)."""
        body: dict[str, Json] = {
            "input_ids": [int(i) for i in input_ids] if not isinstance(input_ids, np.ndarray) else input_ids.tolist(),
            "rid": request_id,
            "sampling_params": _sampling_body(sampling),
            "return_logprob": True,
        }
        if sampling.logprob_mode is LogprobMode.SAMPLING:
            body["return_sampling_mask"] = True
        answer = await self._ask("POST", "/generate", body, deadline_s)
        return parse_generation(answer, sampling.logprob_mode)

    async def score(self, sequences: Sequence[IntArray], *, deadline_s: float) -> list[FloatArray]:
        """Log-probs of given tokens (int32 [T] each) under the live weights at temperature 1, with a fresh KV.

        float32 [T] each, 0 at position 0. One request. Raises `EngineError`, `TimeoutError`.
        """
        body: dict[str, Json] = {
            "input_ids": [sequence.tolist() for sequence in sequences],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answers = await self._ask("POST", "/generate", body, deadline_s)
        return [_prompt_logprobs(len(s), answer["meta_info"]) for s, answer in zip(sequences, answers, strict=True)]

    async def abort(self, request_id: str | None, *, deadline_s: float) -> None:
        body = {"abort_all": True} if request_id is None else {"rid": request_id}
        await self._ask("POST", "/abort_request", body, deadline_s)

    async def pause(self, mode: str, *, deadline_s: float) -> None:
        """mode: in_place, retract or abort."""
        await self._ask("POST", "/pause_generation", {"mode": mode}, deadline_s)

    async def resume(self, *, deadline_s: float) -> None:
        await self._ask("POST", "/continue_generation", {}, deadline_s)

    async def health(self, *, deadline_s: float) -> None:
        """Raises `EngineError` with the reason if the engine cannot serve."""
        await self._ask("GET", "/health", None, deadline_s)

    async def server_info(self, *, deadline_s: float) -> Mapping[str, Json]:
        info: Mapping[str, Json] = await self._ask("GET", "/server_info", None, deadline_s)
        return info

    async def loads(self, *, deadline_s: float) -> Mapping[str, Json]:
        answer = await self._ask("GET", "/v1/loads?include=core", None, deadline_s)
        load: Mapping[str, Json] = answer["loads"][0]
        return load

    async def update_weights_from_disk(self, folder: str, version: PolicyVersion, *, deadline_s: float) -> WeightReport:
        """Raises `EngineError`, past the deadline too; the engine then keeps its old version (B1, B4)."""
        try:
            return await self._update(folder, version, deadline_s)
        except TimeoutError as error:
            raise EngineError(f"version {version} was not adopted within {deadline_s} s") from error

    async def _update(self, folder: str, version: PolicyVersion, deadline_s: float) -> WeightReport:
        body: dict[str, Json] = {"model_path": folder, "weight_version": str(version), "flush_cache": False}
        if self._in_flight_update is None:
            info = await self.server_info(deadline_s=deadline_s)
            self._in_flight_update = bool(info.get("in_flight_update"))
        if self._in_flight_update:
            body["deadline_s"] = deadline_s * _ENGINE_SHARE
            answer = await self._ask("POST", "/update_weights_from_disk", body, deadline_s)
            return WeightReport(PolicyVersion(int(answer["weight_version"])), str(answer["weight_digest"]))
        # Unpaused, SGLang would first wait for every running request to end.
        await self.pause("in_place", deadline_s=deadline_s)
        try:
            await self._ask("POST", "/update_weights_from_disk", body, deadline_s)
        finally:
            await self.resume(deadline_s=deadline_s)
        checks = await self._ask("POST", "/weights_checker", {"action": "checksum"}, deadline_s)
        text = json.dumps(checks, sort_keys=True).encode()
        return WeightReport(version, "sglang-" + hashlib.blake2b(text, digest_size=16).hexdigest())

    async def close(self) -> None:
        await self._transport.close()

    async def _ask(self, method: str, path: str, body: Json, deadline_s: float) -> Json:
        status, answer = await self._transport.request(method, path, body, deadline_s)
        if status >= 400:
            raise EngineError(f"{path}: {_error_text(answer)} (status {status})")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{path}: {_error_text(answer)}")
        return answer


def _prompt_logprobs(count: int, meta: Mapping[str, Json]) -> FloatArray:
    entries = meta["input_token_logprobs"]
    if len(entries) != count:
        raise EngineError(f"{count} prompt tokens came back with {len(entries)} log-probs")
    return np.array([0.0 if entry[0] is None else entry[0] for entry in entries], dtype=np.float32)


def _sampling_body(sampling: SamplingParams) -> dict[str, Json]:
    body: dict[str, Json] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        body["sampling_seed"] = sampling.seed
    return body


def parse_generation(answer: Json, mode: LogprobMode) -> Generation:
    """From the body of one sequence. Raises `EngineError` when log-probs are missing or of another length (B23)."""
    meta = answer["meta_info"]
    ids = np.array(answer["output_ids"], dtype=np.int32)
    logprobs = _logprobs(meta, mode)
    if len(logprobs) != len(ids):
        raise EngineError(f"{len(ids)} output ids came with {len(logprobs)} log-probs of mode {mode}")
    return Generation(
        output_ids=ids,
        logprobs=logprobs,
        versions=_versions(meta, len(ids)),
        finish_reason=_finish(meta["finish_reason"]),
        text=str(answer.get("text") or ""),
    )


def _logprobs(meta: Mapping[str, Json], mode: LogprobMode) -> FloatArray:
    if mode is LogprobMode.SAMPLING:
        return np.array(meta.get("output_token_sampling_logprobs") or [], dtype=np.float32)
    return np.array([entry[0] for entry in meta.get("output_token_logprobs") or []], dtype=np.float32)


def _versions(meta: Mapping[str, Json], count: int) -> IntArray:
    versions = np.full(count, _version(meta.get("weight_version")), dtype=np.int32)
    for span in meta.get("weight_versions") or []:
        versions[span["start"] : span["end"]] = _version(span["version"])
    return versions


def _version(text: Json) -> PolicyVersion:
    """Versions are written str(int); anything else (SGLang's `default`) is no version of ours."""
    return PolicyVersion(int(text)) if str(text).isdecimal() else NO_VERSION


def _finish(reason: Mapping[str, Json]) -> FinishReason:
    kind = str(reason["type"])
    return FinishReason(kind) if kind in ("stop", "length", "abort") else FinishReason.ERROR


def _error_text(answer: Json) -> str:
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        if isinstance(error, dict):
            return str(error.get("message", error))
        return str(error)
    return str(answer)

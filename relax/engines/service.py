"""The protocol's routes over one engine, without a web server: JSON value in, status and JSON value out."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from uuid import uuid4
from weakref import WeakKeyDictionary

import numpy as np

from relax.engines import status as reports
from relax.engines.backend import LocalEngine
from relax.engines.base import EngineError
from relax.engines.bridge import LoopBridge
from relax.engines.embedded import BadRequest
from relax.engines.protocol import (
    AbortBody,
    CheckerBody,
    ContinueBody,
    GenerateBody,
    PauseBody,
    SamplingBody,
    SessionBody,
    UpdateFromDiskBody,
    answer,
    error_body,
    parse,
)
from relax.engines.requests import Output, Request, Result
from relax.engines.sampling import fold_seed
from relax.types import Json, SamplingParams

Reply = tuple[int, Json]
Handler = Callable[[Json], Awaitable[Reply]]
_CONTROL_DEADLINE_S = 30.0


class EngineService:
    """`handle` serves every path but streamed generation, which is `stream`."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self._bridges: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBridge] = WeakKeyDictionary()
        self.routes: dict[tuple[str, str], Handler] = {
            ("POST", "/generate"): self._generate,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/flush_cache"): self._flush_cache,
            ("GET", "/flush_cache"): self._flush_cache,
            ("POST", "/begin_weight_update"): self._session,
            ("POST", "/end_weight_update"): self._session,
            ("POST", "/update_weights_from_disk"): self._update_from_disk,
            ("POST", "/weights_checker"): self._check_weights,
            ("GET", "/ready"): self._ready,
            ("GET", "/health"): self._ready,
            ("GET", "/health_generate"): self._health_generate,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/get_server_info"): self._server_info,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/get_model_info"): self._model_info,
            ("GET", "/v1/loads"): self._loads,
            ("GET", "/metrics"): self._metrics,
        }

    async def handle(self, method: str, path: str, body: Json) -> Reply:
        """Answers every fault with a status and `{"error": {...}}`; raises nothing but cancellation."""
        handler = self.routes.get((method, path.partition("?")[0]))
        if handler is None:
            return 404, error_body(f"no route {method} {path}", 404)
        try:
            return await handler(body)
        except BadRequest as error:
            return 400, error_body(str(error), 400)
        except EngineError as error:
            return 500, error_body(str(error), 500)

    # -- generation -----------------------------------------------------------------------------------------

    async def _generate(self, body: Json) -> Reply:
        parsed = parse(GenerateBody, body)
        if parsed.stream:
            raise BadRequest("stream needs an HTTP connection")
        requests = self._requests(parsed)
        bridge = self._bridge()
        futures = bridge.submit(requests)
        try:
            results = [await future for future in futures]
        except asyncio.CancelledError:
            self._drop(bridge, requests)
            raise
        now = time.monotonic()
        answers = [self._answer(r, result, parsed, now) for r, result in zip(requests, results, strict=True)]
        if parsed.return_logprob and parsed.logprob_start_len == 0:
            prompts = [request.prompt_ids for request in requests]
            scores = await asyncio.to_thread(self.engine.score, prompts, _CONTROL_DEADLINE_S)
            for body_of, prompt, score in zip(answers, prompts, scores, strict=True):
                logprobs = [None, *score[1:].tolist()]
                meta = body_of["meta_info"]
                meta["input_token_logprobs"] = [[lp, i, None] for lp, i in zip(logprobs, prompt.tolist(), strict=True)]
        single = len(answers) == 1 and not isinstance(parsed.input_ids[0], list)
        return 200, answers[0] if single else answers

    def open_stream(self, body: Json) -> AsyncIterator[dict[str, Json]]:
        """Cumulative answers, the last with a finish reason. Raises `BadRequest` before anything is started.

        Closing the iterator aborts the request."""
        parsed = parse(GenerateBody, body)
        requests = self._requests(parsed)
        if len(requests) != 1:
            raise BadRequest("stream serves one sequence per request")
        return self._stream(parsed, requests[0])

    async def _stream(self, body: GenerateBody, request: Request) -> AsyncIterator[dict[str, Json]]:
        bridge = self._bridge()
        queue = bridge.stream(request)
        finished = False
        try:
            while not finished:
                result = await queue.get()
                finished = isinstance(result, EngineError) or result.finish is not None
                yield self._answer(request, result, body, time.monotonic())
        finally:
            if finished:
                bridge.forget(request)
            else:
                self._drop(bridge, [request])

    def _answer(self, request: Request, result: Result, body: GenerateBody, now_s: float) -> dict[str, Json]:
        if isinstance(result, EngineError):
            raise result
        return answer(request, result, body, self.engine.tokenizer, self.engine.version, now_s)

    def _drop(self, bridge: LoopBridge, requests: Sequence[Request]) -> None:
        bridge.flush()
        for request in requests:
            bridge.forget(request)
        if self.engine.healthy():
            self.engine.abort(requests[0].parent_id or requests[0].request_id)

    def _bridge(self) -> LoopBridge:
        loop = asyncio.get_running_loop()
        bridge = self._bridges.get(loop)
        if bridge is None:
            bridge = self._bridges[loop] = LoopBridge(self.engine, loop)
        return bridge

    def _requests(self, body: GenerateBody) -> list[Request]:
        prompts: list[list[int]]
        if body.input_ids and isinstance(body.input_ids[0], list):
            prompts = body.input_ids
        else:
            prompts = [body.input_ids]  # type: ignore[list-item]
        sampling = _per_prompt(body.sampling_params, len(prompts), "sampling_params")
        ids = _ids(body.rid, len(prompts))
        sink, stream = self._bridge(), body.stream
        requests: list[Request] = []
        for prompt, settings, request_id in zip(prompts, sampling, ids, strict=True):
            params = settings.params()
            try:
                array = np.array(prompt, dtype=np.int32)
            except OverflowError:
                raise BadRequest(f"input_ids holds an id outside [0, {self.engine.vocab_size})") from None
            self.engine.check(array, params)
            for k in range(settings.n):
                name = request_id if settings.n == 1 else f"{request_id}_{k}"
                seed = secrets.randbits(64) if params.seed is None else fold_seed(params.seed + k)
                parent = body.rid if isinstance(body.rid, str) else request_id
                requests.append(Request(name, array, params, seed, sink, stream, parent))
        return requests

    # -- control --------------------------------------------------------------------------------------------

    async def _abort(self, body: Json) -> Reply:
        parsed = parse(AbortBody, body)
        if (parsed.rid is None) != parsed.abort_all:
            raise BadRequest("give either rid or abort_all")
        self._bridge().flush()
        self.engine.abort(None if parsed.abort_all else parsed.rid)
        return 200, None

    async def _pause(self, body: Json) -> Reply:
        mode = parse(PauseBody, body).mode
        self._bridge().flush()
        await asyncio.to_thread(self.engine.pause, mode, _CONTROL_DEADLINE_S)
        return 200, {"status": "ok", "message": f"paused ({mode})"}

    async def _continue(self, body: Json) -> Reply:
        parse(ContinueBody, body)
        await asyncio.to_thread(self.engine.resume, _CONTROL_DEADLINE_S)
        return 200, {"status": "ok", "message": "continued"}

    async def _flush_cache(self, body: Json) -> Reply:
        running = self.engine.status().running
        if running:
            return 400, f"not flushed: {running} requests are running"
        return 200, "Cache flushed: nothing is kept between requests"

    async def _session(self, body: Json) -> Reply:
        parse(SessionBody, body)
        return 200, {"success": True, "message": "every update of this engine is one transaction"}

    async def _update_from_disk(self, body: Json) -> Reply:
        parsed = parse(UpdateFromDiskBody, body)
        if parsed.abort_all_requests:
            self.engine.abort(None)
        try:
            report = await asyncio.to_thread(
                self.engine.update_weights_from_disk, parsed.model_path, parsed.version(), parsed.deadline_s
            )
        except BadRequest:
            raise
        except EngineError as error:
            return 400, {"success": False, "message": str(error)}
        return 200, {
            "success": True,
            "message": f"holds version {report.version}",
            "num_paused_requests": 0,
            "weight_version": reports.version_text(report.version),
            "weight_digest": report.digest,
        }

    async def _check_weights(self, body: Json) -> Reply:
        parse(CheckerBody, body)
        digest, tensors = await asyncio.to_thread(self.engine.checksums, _CONTROL_DEADLINE_S)
        return 200, {"success": True, "message": "checksum", "weight_digest": digest, "checksums": tensors}

    # -- reports --------------------------------------------------------------------------------------------

    async def _ready(self, body: Json) -> Reply:
        if self.engine.healthy():
            return 200, {"status": "ok"}
        return 503, error_body(self.engine.failure or "the engine is not running", 503)

    async def _health_generate(self, body: Json) -> Reply:
        # A paused engine cannot generate and is not ill.
        if not self.engine.healthy() or self.engine.paused:
            return await self._ready(body)
        bridge = self._bridge()
        one = SamplingParams(max_new_tokens=1)
        request = Request(f"health-{uuid4().hex}", np.zeros(1, np.int32), one, 0, bridge)
        [future] = bridge.submit([request])
        try:
            async with asyncio.timeout(_CONTROL_DEADLINE_S):
                result = await future
        except TimeoutError:
            self._drop(bridge, [request])
            return 503, error_body(f"no token within {_CONTROL_DEADLINE_S} s", 503)
        return (200, {"status": "ok"}) if isinstance(result, Output) else (503, error_body(str(result), 503))

    async def _server_info(self, body: Json) -> Reply:
        return 200, reports.server_info(self.engine.status(), self.engine.model_path)

    async def _model_info(self, body: Json) -> Reply:
        return 200, {
            "model_path": self.engine.model_path,
            "served_model_name": self.engine.model_path,
            "tokenizer_path": self.engine.model_path,
            "is_generation": True,
            "weight_version": reports.version_text(self.engine.version),
            "architectures": [self.engine.model_class],
        }

    async def _loads(self, body: Json) -> Reply:
        return 200, reports.loads(self.engine.status())

    async def _metrics(self, body: Json) -> Reply:
        return 200, reports.metrics_text(self.engine.status(), self.engine.model_path)


def _per_prompt(value: SamplingBody | list[SamplingBody], count: int, name: str) -> list[SamplingBody]:
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise BadRequest(f"{name} has {len(values)} entries for {count} prompts")
    return values


def _ids(rid: str | list[str] | None, count: int) -> list[str]:
    if isinstance(rid, list):
        if len(rid) != count:
            raise BadRequest(f"rid has {len(rid)} entries for {count} prompts")
        return rid
    base = rid or uuid4().hex
    return [base] if count == 1 else [f"{base}_{i}" for i in range(count)]

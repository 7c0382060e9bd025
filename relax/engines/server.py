"""The engine's protocol over real HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from relax.engines.base import EngineError
from relax.engines.embedded import BadRequest
from relax.engines.protocol import error_body
from relax.engines.service import EngineService
from relax.types import Json


def build_app(service: EngineService) -> Starlette:
    async def endpoint(request: Request) -> Response:
        raw = await request.body()
        try:
            body = json.loads(raw) if raw else None
        except ValueError as error:
            return JSONResponse(error_body(f"the body is not JSON: {error}", 400), 400)
        if request.url.path == "/generate" and isinstance(body, dict) and body.get("stream"):
            try:
                answers = service.open_stream(body)
            except BadRequest as error:
                return JSONResponse(error_body(str(error), 400), 400)
            return StreamingResponse(_events(answers), media_type="text/event-stream")
        call = asyncio.ensure_future(service.handle(request.method, request.url.path, body))
        if request.url.path != "/generate":
            return _response(*await call)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return _response(*call.result())
            return Response(status_code=499)  # nobody reads it; the request is aborted below
        finally:
            gone.cancel()
            call.cancel()

    paths = sorted({path for _, path in service.routes})
    methods = {path: [m for m, p in service.routes if p == path] for path in paths}
    return Starlette(routes=[Route(path, endpoint, methods=methods[path]) for path in paths])


def _response(status: int, body: Json) -> Response:
    if body is None:
        return Response(status_code=status)
    return PlainTextResponse(body, status) if isinstance(body, str) else JSONResponse(body, status)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(answers: AsyncIterator[dict[str, Json]]) -> AsyncIterator[str]:
    try:
        async for part in answers:
            yield f"data: {json.dumps(part)}\n\n"
    except EngineError as error:
        yield f"data: {json.dumps(error_body(str(error), 500))}\n\n"
    yield "data: [DONE]\n\n"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


class HttpServer:
    """uvicorn in a thread. Port 0 takes a free one; `url` is the real one."""

    def __init__(self, service: EngineService, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, port))
        self.host, self.port = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            build_app(service),
            log_config=None,  # its own would close the log handlers of this process, and Serve reads one of them
            log_level="warning",
            lifespan="off",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="relax-engine-http", daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self, deadline_s: float) -> None:
        """Raises `EngineError` unless the server listens within the deadline."""
        self._thread.start()
        if not self._server.ready.wait(deadline_s):
            raise EngineError(f"the HTTP server did not listen on {self.url} within {deadline_s} s")

    def stop(self, deadline_s: float) -> None:
        """Raises `EngineError` if the server still runs after the deadline."""
        self._server.should_exit = True
        self._thread.join(deadline_s)
        self._socket.close()
        if self._thread.is_alive():
            raise EngineError(f"the HTTP server did not stop within {deadline_s} s")

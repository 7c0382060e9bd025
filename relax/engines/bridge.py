"""Between an event loop and the decode thread."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence

from relax.engines.backend import LocalEngine
from relax.engines.base import EngineError
from relax.engines.requests import Request, Result


class LoopBridge:
    """Carries requests from one event loop to the decode thread and results back.

    Requests made in one turn of the loop are submitted together, so that they are prefilled together;
    results of one decode step come back with one wake-up.
    """

    def __init__(self, engine: LocalEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        # Weak: bridges are kept by loop, and must not keep a finished loop alive.
        self._loop = weakref.ref(loop)
        self._pending: list[Request] = []
        self._results: dict[Request, asyncio.Queue[Result] | asyncio.Future[Result]] = {}

    def submit(self, requests: Sequence[Request]) -> list[asyncio.Future[Result]]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Result]] = [loop.create_future() for _ in requests]
        self._results.update(zip(requests, futures, strict=True))
        self._queue(requests)
        return futures

    def stream(self, request: Request) -> asyncio.Queue[Result]:
        queue: asyncio.Queue[Result] = asyncio.Queue()
        self._results[request] = queue
        self._queue([request])
        return queue

    def forget(self, request: Request) -> None:
        self._results.pop(request, None)

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            self._engine.submit(pending)
        except EngineError as error:
            self._resolve([(request, error) for request in pending])

    def deliver(self, batch: Sequence[tuple[Request, Result]]) -> None:
        loop = self._loop()
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._resolve, batch)
        except RuntimeError:
            return  # the loop is closed: whoever asked is gone

    def _queue(self, requests: Sequence[Request]) -> None:
        if not self._pending:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pending.extend(requests)

    def _resolve(self, batch: Sequence[tuple[Request, Result]]) -> None:
        for request, result in batch:
            target = self._results.get(request)
            if isinstance(target, asyncio.Queue):
                target.put_nowait(result)
            elif target is not None:
                del self._results[request]
                if not target.done():
                    target.set_result(result)

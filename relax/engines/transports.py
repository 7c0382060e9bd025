"""The two ways to an engine: in this process, and over HTTP."""

from __future__ import annotations

import asyncio

import httpx

from relax.engines.base import EngineError
from relax.engines.service import EngineService
from relax.types import Json


class LocalTransport:
    """Same paths and bodies as HTTP, as Python values, without a socket or an encoder."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def request(self, method: str, path: str, body: Json, deadline_s: float) -> tuple[int, Json]:
        async with asyncio.timeout(deadline_s):
            return await self._service.handle(method, path, body)

    async def close(self) -> None:
        """The engine belongs to whoever made it."""


class HttpTransport:
    """One server. A call past its deadline closes its connection, which makes the server abort the request."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        # Requests wait in the engine, not here: no bound on connections, and the deadline is the call's own.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._client = httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits, trust_env=False)

    async def request(self, method: str, path: str, body: Json, deadline_s: float) -> tuple[int, Json]:
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._client.request(method, path, json=body if method == "POST" else None)
        except httpx.TransportError as error:
            raise EngineError(f"engine at {self._base_url} is unreachable: {error!r}") from error
        if not response.content:
            return response.status_code, None
        if response.headers.get("content-type", "").startswith("application/json"):
            return response.status_code, response.json()
        return response.status_code, response.text

    async def close(self) -> None:
        await self._client.aclose()

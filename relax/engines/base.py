"""The inference backend protocol.

An engine speaks the SGLang HTTP protocol (subset of 0.5.23): JSON bodies in, JSON bodies out. One
`EngineClient` talks to every engine through a `Transport`: `HttpTransport` for a server,
`LocalTransport` for an engine in the same process (same paths, same bodies, no socket).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from relax.types import FinishReason, FloatArray, IntArray, Json, PolicyVersion, RelaxError, SamplingParams


class EngineError(RelaxError):
    """The engine refused or failed a call; carries its own words."""


class Transport(Protocol):
    async def request(self, method: str, path: str, body: Json, deadline_s: float) -> tuple[int, Json]:
        """Status and decoded JSON body. Raises `TimeoutError` past the deadline, `EngineError` when unreachable."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished (or aborted) request.

    output_ids: int32 [N], end token included; logprobs: float32 [N] in the mode that was asked for;
    versions: int32 [N], the policy version that drew each token.
    """

    output_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish_reason: FinishReason
    text: str


@dataclass(frozen=True, slots=True)
class WeightReport:
    """What an engine holds after an adoption: version and the digest of its own live parameters (B2)."""

    version: PolicyVersion
    digest: str


class EngineClient(Protocol):
    """What workers and instances use. Implemented once, in `relax.engines.client`."""

    async def generate(
        self, input_ids: IntArray, sampling: SamplingParams, *, request_id: str, deadline_s: float
    ) -> Generation: ...

    async def score(self, sequences: Sequence[IntArray], *, deadline_s: float) -> list[FloatArray]:
        """Log-probs of given tokens under the live weights at temperature 1, fresh KV; 0 at position 0."""
        ...

    async def abort(self, request_id: str | None, *, deadline_s: float) -> None:
        """Abort one request, or all with None; each waiting `generate` returns its partial output."""
        ...

    async def server_info(self, *, deadline_s: float) -> Mapping[str, Json]: ...

    async def loads(self, *, deadline_s: float) -> Mapping[str, Json]:
        """num_running_reqs, num_waiting_reqs, max_running_requests, gen_throughput and so on."""
        ...

    async def update_weights_from_disk(self, folder: str, version: PolicyVersion, *, deadline_s: float) -> WeightReport:
        """Adopt a published version (see `relax.weights`): verified, then swapped between two decode
        steps, all or nothing. Requests go on. Raises `EngineError` and keeps the old version on a mismatch (B4)."""
        ...

    async def close(self) -> None: ...

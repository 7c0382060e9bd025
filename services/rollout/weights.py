"""The folder of a published version on this node: the store's own, or a copy pulled over TCP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import ray

from relax.config.run import RunConfig
from relax.engines.base import EngineError
from relax.types import PolicyVersion, RelaxError
from relax.weights.cache import WeightCache
from relax.weights.tcp import WeightSource, is_loopback
from services.dcs.api import PublishedVersion, StorePlace, Unreachable
from services.runtime import RoleReporter


class NodeWeights:
    """Which of the two it is follows from where the store lies, never from trying.

    The copy lies in this node's memory-backed folder and not in the instance: several instances pull it once, and the
    engine adopts it by the path it knows. Raises `Unreachable` when the run's addresses rule both out.
    """

    def __init__(self, place: StorePlace, run: RunConfig, reporter: RoleReporter):
        self.node_id = ray.get_runtime_context().get_node_id()
        self._reporter = reporter
        self._cache: WeightCache | None = None
        source = place.source_for(self.node_id)
        if place.node_id != self.node_id and is_loopback(run.bus.host):
            raise Unreachable(
                f"this instance is on node {self.node_id[:8]}, which run.bus.host {run.bus.host} of node "
                f"{place.node_id[:8]} does not serve: set it to an interface of that node"
            )
        if source is not None:
            self._cache = WeightCache(place.cache_root(self.node_id), place.keep, place.reserve_bytes)
        reporter.facts["weights_over"] = "shared_memory" if source is None else "tcp"

    async def folder(self, published: PublishedVersion, deadline_s: float) -> str:
        """Raises `EngineError`: this version cannot be had, and the engine keeps what it holds."""
        if self._cache is None:
            return published.folder
        try:
            source = published.place.source_for(self.node_id)  # anew: a restarted server has another port and secret
            assert source is not None
            return str(await asyncio.to_thread(self._fetch, self._cache, source, published, deadline_s))
        except (RelaxError, OSError) as error:
            raise EngineError(f"version {published.version} was not pulled: {error}") from error

    def _fetch(self, cache: WeightCache, source: WeightSource, published: PublishedVersion, deadline_s: float) -> Path:
        return cache.fetch(
            source,
            PolicyVersion(published.version),
            published.digest,
            deadline_s,
            on_retry=lambda reason: self._reporter.count(f"pull_retries_{reason}"),
        )

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None

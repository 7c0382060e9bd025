"""What the engine reports of itself, in SGLang's shapes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from relax.types import NO_VERSION, Json, PolicyVersion


class RateMeter:
    """Tokens per second between the reads of a counter, over at least one second."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._total = 0
        self._rate = 0.0

    def value(self, now_s: float, total: int) -> float:
        elapsed = now_s - self._since_s
        if elapsed >= 1.0:
            self._rate = (total - self._total) / elapsed
            self._since_s, self._total = now_s, total
        return self._rate


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counters since the start, and the state at one moment.

    busy_s: wall seconds inside forwards and sampling; swap_stall_s: seconds that decoding stood still for weight
    swaps; weight_load_s: duration of the last update, load and checks included.
    """

    version: PolicyVersion
    healthy: bool
    failure: str | None
    paused: bool
    running: int
    waiting: int
    slots: int
    max_context: int
    used_tokens: int
    gen_throughput: float
    busy_s: float
    generated_tokens: int
    prompt_tokens: int
    finished_requests: int
    aborted_requests: int
    failed_requests: int
    retractions: int
    steps: int
    swap_stall_s: float
    weight_updates: int
    failed_weight_updates: int
    weight_load_s: float

    @property
    def max_tokens(self) -> int:
        return self.slots * self.max_context


def version_text(version: PolicyVersion) -> str:
    """How the protocol writes a version; SGLang calls the weights of the start `default`."""
    return "default" if version == NO_VERSION else str(version)


def server_info(status: EngineStatus, model_path: str) -> dict[str, Json]:
    return {
        **asdict(status),
        "backend": "embedded",
        "in_flight_update": True,
        "model_path": model_path,
        "weight_version": version_text(status.version),
        "max_running_requests": status.slots,
        "max_total_num_tokens": status.max_tokens,
        "context_length": status.max_context,
        "internal_states": [{"last_gen_throughput": status.gen_throughput}],
    }


def loads(status: EngineStatus) -> dict[str, Json]:
    return {
        "timestamp": time.time(),
        "version": "embedded",
        "loads": [
            {
                "dp_rank": 0,
                "num_running_reqs": status.running,
                "num_waiting_reqs": status.waiting,
                "num_used_tokens": status.used_tokens,
                "max_total_num_tokens": status.max_tokens,
                "max_running_requests": status.slots,
                "token_usage": status.used_tokens / status.max_tokens,
                "gen_throughput": status.gen_throughput,
                "cache_hit_rate": 0.0,
                "utilization": status.running / status.slots,
            }
        ],
    }


class _StatusCollector:
    def __init__(self, status: EngineStatus, model_path: str) -> None:
        self._status = status
        self._labels = {"model_name": model_path, "engine_type": "embedded"}

    def collect(self) -> Iterator[Metric]:
        s = self._status
        gauges = {
            "num_running_reqs": s.running,
            "num_queue_reqs": s.waiting,
            "num_paused_reqs": s.running if s.paused else 0,
            "num_used_tokens": s.used_tokens,
            "max_total_num_tokens": s.max_tokens,
            "token_usage": s.used_tokens / s.max_tokens,
            "utilization": s.running / s.slots,
            "gen_throughput": s.gen_throughput,
            "cache_hit_rate": 0.0,
            "weight_load_duration_seconds": s.weight_load_s,
        }
        counters = {
            "prompt_tokens": s.prompt_tokens,
            "generation_tokens": s.generated_tokens,
            "num_requests": s.finished_requests + s.aborted_requests + s.failed_requests,
            "num_aborted_requests": s.aborted_requests,
            "num_retracted_reqs": s.retractions,
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(f"sglang:{name}", name, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
        for name, total in counters.items():
            counter = CounterMetricFamily(f"sglang:{name}", name, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), total)
            yield counter


def metrics_text(status: EngineStatus, model_path: str) -> str:
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status, model_path))
    return generate_latest(registry).decode()

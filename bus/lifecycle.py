"""Creating, checking and ending the bus of a run. Only its supervisor calls these."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bus.errors import BusError, BusTimeout, BusUnavailable
from bus.hosts import EngineActor, StorageActor
from bus.index import Limits
from bus.records import BusAddress
from bus.schema import JSON_BYTES, TOKEN_FIELDS, bytes_per_token
from relax.config.run import BusConfig

_ENVIRONMENT = {
    # One core serves requests; more threads only slow TransferQueue's scans down.
    "OMP_NUM_THREADS": "1",
    "TQ_NUM_THREADS": "1",
    "TQ_LOGGING_LEVEL": "ERROR",
    "TQ_PRE_ALLOC_SAMPLE_NUM": "1",
}
_GONE_POLL_S = 0.05
_ENGINE_CALLS = 1000
"""Calls that may wait in the engine at once: long polls of every replica."""


def limits_for(
    config: BusConfig,
    max_tokens: int,
    *,
    fields: tuple[str, ...] = TOKEN_FIELDS,
    top_k: int = 0,
    complete_fields: tuple[str, ...] = ("reward",),
) -> Limits:
    """Bounds of the index. `fields`: the per-token fields that a row can come to hold."""
    return Limits(
        max_rows=config.max_rows,
        max_bytes=config.max_bytes,
        retained_max_bytes=config.max_bytes,
        max_tokens=max_tokens,
        bytes_per_token=bytes_per_token(fields, top_k),
        fixed_bytes=JSON_BYTES,
        lease_ttl_s=config.lease_ttl_s,
        max_deliveries=config.max_deliveries,
        partition_rows=config.partition_rows,
        complete_fields=complete_fields,
    )


def bus_address(run_id: str, namespace: str, config: BusConfig) -> BusAddress:
    """Where the bus of a run is, if there is one: its names follow from the run."""
    stores = tuple(f"bus-{run_id}-store-{i}" for i in range(config.storage_units))
    return BusAddress(run_id, namespace, f"bus-{run_id}-engine", stores)


def create_bus(
    run_id: str,
    namespace: str,
    config: BusConfig,
    max_tokens: int,
    *,
    fields: tuple[str, ...] = TOKEN_FIELDS,
    top_k: int = 0,
    complete_fields: tuple[str, ...] = ("reward",),
    deadline_s: float = 60.0,
) -> BusAddress:
    """Start the bus of a run on this node, empty, and wait until it serves.

    Its actors are detached: they outlive the caller until `destroy_bus`. complete_fields: what a
    row must have for its group to be complete. Raises BusTimeout, or BusUnavailable when an actor
    cannot start (name or port taken).
    """
    limits = limits_for(config, max_tokens, fields=fields, top_k=top_k, complete_fields=complete_fields)
    address = bus_address(run_id, namespace, config)
    deadline = time.monotonic() + deadline_s
    ports = _free_ports(config.host, 2 + config.storage_units)
    made: list[Any] = []
    try:
        stores = []
        for name, port in zip(address.stores, ports[2:], strict=True):
            stores.append(StorageActor.options(**_options(name, namespace)).remote(config.host, port))
            made.append(stores[-1])
        engine = EngineActor.options(**_options(address.engine, namespace), max_concurrency=_ENGINE_CALLS).remote(
            config.host, (ports[0], ports[1]), limits
        )
        made.append(engine)
        ray.get(engine.call.remote("start", stores), timeout=max(0.0, deadline - time.monotonic()))
    except GetTimeoutError as error:
        _kill(made)
        raise BusTimeout(f"the bus of run {run_id} did not start within {deadline_s} s") from error
    except RayError as error:
        _kill(made)
        raise BusUnavailable(f"the bus of run {run_id} cannot start: {error}") from error
    return address


def ping(address: BusAddress, deadline_s: float) -> str:
    """The epoch of the bus, once engine and stores have answered. BusTimeout or BusUnavailable."""
    try:
        engine = ray.get_actor(address.engine, namespace=address.namespace)
        reply = ray.get(engine.call.remote("ping"), timeout=deadline_s)
    except GetTimeoutError as error:
        raise BusTimeout(f"{address.engine} did not answer within {deadline_s} s") from error
    except (RayError, ValueError) as error:
        raise BusUnavailable(f"{address.engine} or one of its stores is gone: {error}") from error
    if isinstance(reply, BusError):
        raise reply
    return str(reply)


def destroy_bus(address: BusAddress, deadline_s: float = 30.0) -> None:
    """End all processes of the bus. Those already gone are no error.

    Their names are free when this returns. Raises BusTimeout when one is still known after `deadline_s`.
    """
    deadline = time.monotonic() + deadline_s
    for name in (address.engine, *address.stores):
        with contextlib.suppress(ValueError):
            while True:
                _kill([ray.get_actor(name, namespace=address.namespace)])
                if time.monotonic() > deadline:
                    raise BusTimeout(f"{name} is still there after {deadline_s} s")
                time.sleep(_GONE_POLL_S)


def _options(name: str, namespace: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": namespace,
        "lifetime": "detached",
        "num_cpus": 0,
        "runtime_env": {"env_vars": _ENVIRONMENT},
        # The ports were found free on this node.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }


def _kill(actors: list[Any]) -> None:
    for actor in actors:
        ray.kill(actor, no_restart=True)


def _free_ports(host: str, count: int) -> list[int]:
    """Ports free on `host` now; all are held until the last is found, so they differ."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.bind((host, 0))
            ports.append(int(probe.getsockname()[1]))
        return ports

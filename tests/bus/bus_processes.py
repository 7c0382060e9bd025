"""Looking into and killing the processes of a bus under test."""

from __future__ import annotations

import os
import uuid
from typing import Any

import psutil
import ray

from bus.records import BusAddress


def inside(address: BusAddress, name: str, look: Any) -> Any:
    """Call `look(actor)` within the process of one actor of the bus."""
    actor = ray.get_actor(name, namespace=address.namespace)
    return ray.get(actor.__ray_call__.remote(look), timeout=20)


def kill(address: BusAddress, name: str) -> None:
    """SIGKILL one actor's process and wait until it is gone."""
    process = psutil.Process(inside(address, name, lambda actor: os.getpid()))
    process.kill()
    process.wait(20)


def rows_held(address: BusAddress) -> int:
    return int(inside(address, address.stores[0], lambda host: len(host._storage.storage_data._active_keys)))


def unique(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:6]}:0:0"

"""Rows and groups as the services make them, for tests and processes of tests."""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import Any

import numpy as np

from bus.client import BusClient
from bus.lifecycle import create_bus
from bus.records import BusAddress, GroupAdmission, Lease, LeaseRequest, RowPut
from relax.config.run import BusConfig
from relax.types import PolicyVersion

TRAIN_FIELDS = ("tokens", "loss_mask", "rollout_logprobs", "versions", "reward")


def group(group_id: str, seq: int, size: int = 2) -> GroupAdmission:
    return GroupAdmission(group_id, seq, size, PolicyVersion(0), {"text": f"prompt of {group_id}", "label": seq})


def sample(group_id: str, k: int, tokens: int = 8, seed: int = 0) -> RowPut:
    draw = np.random.default_rng((seed, k))
    mask = np.arange(tokens) > 1
    fields: dict[str, Any] = {
        "tokens": draw.integers(0, 99, tokens).astype(np.int32),
        "loss_mask": mask,
        "rollout_logprobs": np.where(mask, -draw.random(tokens), 0).astype(np.float32),
        "versions": np.where(mask, 0, -1).astype(np.int32),
        "finish_reason": "stop",
    }
    return RowPut(f"{group_id}/{k}/0", group_id, fields)


def reward_of(row_id: str, value: float = 1.0) -> RowPut:
    return RowPut(row_id, row_id.split("/")[0], {"reward": value, "accuracy": value, "reward_state": "ok"})


def start_bus(namespace: str, config: BusConfig, run_id: str = "") -> BusAddress:
    """A bus for rows of up to 64 tokens. On a busy machine its imports alone can take a minute."""
    return create_bus(run_id or f"t{uuid.uuid4().hex[:8]}", namespace, config, max_tokens=64, deadline_s=300)


async def connect(address: BusAddress, config: BusConfig, owner: str) -> BusClient:
    return await BusClient.connect(address, owner=owner, role="test", config=config, deadline_s=60)


async def generate(client: BusClient, groups: int = 1) -> Lease:
    lease = await client.lease(LeaseRequest("rollout", ("prompt",), max_items=groups), wait_s=30)
    assert isinstance(lease, Lease), lease
    rows = [sample(info.group_id, k) for info in lease.groups for k in info.missing]
    await client.put(rows, lease_id=lease.lease_id, deadline_s=30)
    await client.ack(lease.lease_id)
    return lease


async def score(client: BusClient, rows: int) -> Lease:
    lease = await client.lease(LeaseRequest("reward", ("tokens", "prompt"), max_items=rows), wait_s=30)
    assert isinstance(lease, Lease), lease
    await client.put([reward_of(row.row_id) for row in lease.rows], lease_id=lease.lease_id, deadline_s=30)
    await client.ack(lease.lease_id)
    return lease


async def hold_for_ever(address: BusAddress, config: BusConfig, namespace: str) -> None:
    """Lease a group, keep it alive, say so on stdout, and never end: to be killed."""
    client = await connect(address, config, "victim")
    lease = await client.lease(LeaseRequest("rollout", ("prompt",), ttl_s=3.0), wait_s=30, keep=True)
    assert isinstance(lease, Lease)
    print(lease.groups[0].group_id, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import json

    import ray

    spec = json.loads(sys.argv[1])
    ray.init(address=spec["ray"], namespace=spec["namespace"], log_to_driver=False)
    bus = BusAddress(**(spec["address"] | {"stores": tuple(spec["address"]["stores"])}))
    asyncio.run(hold_for_ever(bus, BusConfig(**spec["config"]), spec["namespace"]))

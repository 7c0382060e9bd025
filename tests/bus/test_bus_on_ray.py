"""The way of groups through the bus with real processes: Ray actors, TransferQueue storage, sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from bus_processes import inside, rows_held, unique
from bus_traffic import TRAIN_FIELDS, connect, generate, group, reward_of, sample, score

from bus.client import SyncBusClient
from bus.codec import INLINE_BYTES
from bus.errors import BusError, BusFull, LeaseLost
from bus.lifecycle import ping
from bus.records import BusAddress, Empty, EventKind, Lease, LeaseRequest, Rollback, Verdict, VerdictKind
from relax.config.run import BusConfig
from relax.types import PolicyVersion

pytestmark = pytest.mark.ray


async def test_a_group_travels_from_the_prompt_to_the_checkpoint(
    bus_address: BusAddress, bus_config: BusConfig
) -> None:
    """behaviour: B16"""
    client = await connect(bus_address, bus_config, "all")
    before = await client.stats()
    good, dull = unique("good"), unique("dull")
    await client.admit([group(good, 0), group(dull, 1)], 30)
    lease = await generate(client, groups=2)
    assert [row.fields["prompt"]["label"] for row in lease.rows] == [0, 1]
    scored = await score(client, 4)
    assert scored.rows[0].fields["prompt"]["text"] == f"prompt of {good}"
    events = [e for e in await client.events(0, wait_s=30) if e.group_id in (good, dull)]
    assert [(e.kind, e.members[0].reward) for e in events] == [(EventKind.COMPLETE, 1.0)] * 2
    await client.judge([Verdict(good, VerdictKind.ACCEPTED), Verdict(dull, VerdictKind.FILTERED, "constant")])
    batch = await client.lease(LeaseRequest("actor", TRAIN_FIELDS, max_items=2), wait_s=30)
    assert isinstance(batch, Lease)
    assert [row.row_id for row in batch.rows] == [f"{good}/0/0", f"{good}/1/0"]
    for row in batch.rows:
        for name, value in sample(good, row.k).fields.items():
            if name in TRAIN_FIELDS:
                assert np.array_equal(row.array(name), value)
                assert row.array(name).dtype == value.dtype
        assert row.array("reward") == np.float32(1)
    await client.ack(batch.lease_id, tags={"step": 1})
    assert await client.gc(1) == 3
    account = (await client.stats()).account
    assert account.trained == before.account.trained + 2
    assert account.dropped["constant"] == 2
    assert account.balanced
    async with asyncio.timeout(20):
        while (await client.stats()).retained_rows:
            await asyncio.sleep(0.05)
    await client.close()


async def test_small_and_large_rows_of_one_put_come_back_as_they_were(
    bus_address: BusAddress, bus_config: BusConfig
) -> None:
    client = await connect(bus_address, bus_config, "all")
    small, large = group(unique("small"), 0), group(unique("large"), 1)
    large = replace(large, prompt={"text": "x" * 2 * INLINE_BYTES})
    await client.admit([small, large], 30)
    lease = await client.lease(LeaseRequest("rollout", ("prompt",), max_items=2), wait_s=30)
    assert isinstance(lease, Lease)
    assert {row.group_id: row.json("prompt") for row in lease.rows} == {g.group_id: g.prompt for g in (small, large)}
    for admitted in (small, large):
        await client.drop(admitted.group_id, "deadline")
    await client.close()


async def test_freed_rows_leave_the_storage(bus_address: BusAddress, bus_config: BusConfig) -> None:
    name = unique("s")
    client = await connect(bus_address, bus_config, "all")
    await client.admit([group(name, 0)], 30)
    await generate(client)
    assert await asyncio.to_thread(rows_held, bus_address) == 3
    await client.drop(name, "deadline")
    async with asyncio.timeout(20):
        while await asyncio.to_thread(rows_held, bus_address):
            await asyncio.sleep(0.05)
    await client.close()


async def test_a_leased_block_keeps_acknowledges_and_releases(bus_address: BusAddress, bus_config: BusConfig) -> None:
    client = await connect(bus_address, bus_config, "all")
    name = unique("s")
    await client.admit([group(name, 0)], 30)
    request = LeaseRequest("rollout", ("prompt",), ttl_s=0.3)
    with pytest.raises(ZeroDivisionError):
        async with client.leased(request, 30) as lease:
            raise ZeroDivisionError
    async with client.leased(request, 30) as lease:
        assert isinstance(lease, Lease)
        assert isinstance(await client.lease(request, wait_s=1.0), Empty), "three times its ttl"
        await client.put([sample(name, k) for k in (0, 1)], lease_id=lease.lease_id, deadline_s=30)
    with pytest.raises(LeaseLost):
        await client.extend(lease.lease_id)
    await client.drop(name, "test over")
    await client.close()


async def test_a_waiting_lease_is_woken_by_the_put(bus_address: BusAddress, bus_config: BusConfig) -> None:
    name = unique("s")
    client = await connect(bus_address, bus_config, "all")
    waiting = asyncio.create_task(client.lease(LeaseRequest("rollout", ("prompt",)), wait_s=60))
    scoring = asyncio.create_task(client.lease(LeaseRequest("reward", ("tokens",)), wait_s=60))
    await client.admit([group(name, 0)], 30)
    lease = await asyncio.wait_for(waiting, 20)
    assert isinstance(lease, Lease)
    await client.put([sample(name, 0)], lease_id=lease.lease_id, deadline_s=30)
    assert isinstance(await asyncio.wait_for(scoring, 20), Lease)
    await client.drop(name, "test over")
    await client.close()


async def test_admission_waits_for_room_and_says_so_at_its_deadline(own_bus: BusAddress, bus_config: BusConfig) -> None:
    """behaviour: B35"""
    client = await connect(own_bus, bus_config, "all")
    await client.admit([group(f"s:0:{i}", i, size=8) for i in range(8)], 30)
    with pytest.raises(BusFull):
        await client.admit([group("s:0:8", 8, size=8)], 0.3)
    waiting = asyncio.create_task(client.admit([group("s:0:8", 8, size=8)], 20))
    await client.drop("s:0:0", "deadline")
    assert (await waiting).admitted == 1
    await client.close()


def test_listening_sockets_are_on_loopback_only(bus_address: BusAddress) -> None:
    """The wire of TransferQueue is unauthenticated. Ray's own sockets are Ray's matter."""
    pids = [inside(bus_address, name, lambda actor: os.getpid()) for name in (bus_address.engine, *bus_address.stores)]
    infos = [inside(bus_address, bus_address.engine, lambda host: host._engine.zmq_server_info.ports)]
    infos += [
        inside(bus_address, name, lambda host: host._storage.zmq_server_info.ports) for name in bus_address.stores
    ]
    ports = {port for info in infos for port in info.values()}
    seen = set()
    for pid in pids:
        for connection in psutil.Process(pid).net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports:
                assert connection.laddr.ip == "127.0.0.1"
                seen.add(connection.laddr.port)
    assert seen == ports
    assert len(ports) == 3
    own_address = socket.gethostbyname(socket.gethostname())
    if not own_address.startswith("127."):
        for port in ports:
            with socket.socket() as probe:
                assert probe.connect_ex((own_address, port)) != 0


async def test_the_engine_serves_only_the_notice_on_its_socket(bus_address: BusAddress, bus_config: BusConfig) -> None:
    from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

    client = await connect(bus_address, bus_config, "all")
    store = client._core._at.store

    async def save() -> ZMQMessage:
        request = ZMQMessage.create(ZMQRequestType.SAVE_CONTROLLER_CHECKPOINT, "TQ_STORAGE_x", {"path": "/tmp/x"})
        async with store._commits.alease(store.controller_info) as wire:
            await wire.send_multipart(request.serialize())
            return ZMQMessage.deserialize(await wire.recv_multipart(copy=False))

    reply = await asyncio.wait_for(client._loop.run(save()), 10)
    assert reply.request_type == ZMQRequestType.REQUEST_ERROR
    await client.close()


async def test_calls_from_a_loop_leave_torch_threads_alone(bus_address: BusAddress, bus_config: BusConfig) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        client = await connect(bus_address, bus_config, "all")
        name = unique("s")
        await client.admit([group(name, 0)], 30)
        await generate(client)
        await score(client, 2)
        assert torch.get_num_threads() == before + 1
        await client.drop(name, "test over")
        await client.close()
    finally:
        torch.set_num_threads(before)


def test_the_blocking_client_does_the_same(bus_address: BusAddress, bus_config: BusConfig) -> None:
    name = unique("s")
    client = SyncBusClient.connect(bus_address, owner="trainer", role="actor", config=bus_config, deadline_s=30)
    assert client.admit([group(name, 0)], 30).admitted == 1
    with client.leased(LeaseRequest("rollout", ("prompt",)), 30) as lease:
        assert isinstance(lease, Lease)
        assert client.put([sample(name, k) for k in (0, 1)], lease_id=lease.lease_id, deadline_s=30).stored == 10
    with client.leased(LeaseRequest("reward", ("tokens",), max_items=9), 30) as lease:
        assert isinstance(lease, Lease)
        client.put([reward_of(row.row_id) for row in lease.rows], lease_id=lease.lease_id, deadline_s=30)
    assert client.judge([Verdict(name, VerdictKind.ACCEPTED)]) == 1
    batch = client.lease(LeaseRequest("actor", TRAIN_FIELDS), wait_s=5, keep=True)
    assert isinstance(batch, Lease)
    client.set_version(PolicyVersion(1), 1, 1)
    assert client.ack(batch.lease_id, tags={"step": 9}).acked == 1
    trained = client.stats().account.trained
    assert client.rollback(Rollback(1, 8, (name,)))
    assert client.stats().account.trained == trained - 2
    assert client.open_groups()[name]
    with pytest.raises(BusError, match="only grow"):
        client.set_version(PolicyVersion(0), 0, 0)
    assert client.drop(name, "test over")
    client.close()


async def test_ping_answers_with_the_epoch(bus_address: BusAddress, bus_config: BusConfig) -> None:
    client = await connect(bus_address, bus_config, "all")
    assert await asyncio.to_thread(ping, bus_address, 10.0) == client.caller.epoch
    await client.close()

"""The bus with real processes: Ray actors, TransferQueue storage, sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from bus_traffic import TRAIN_FIELDS, connect, generate, group, reward_of, sample, score, start_bus

from bus.client import BusClient, SyncBusClient
from bus.codec import encode_field, pack
from bus.errors import BusError, BusFull, BusTimeout, BusUnavailable, CorruptRow, Fenced, LeaseLost, StaleEpoch
from bus.lifecycle import destroy_bus, ping
from bus.records import (
    DRAIN,
    BusAddress,
    Caller,
    Closed,
    Empty,
    EventKind,
    Lease,
    LeaseRequest,
    Verdict,
    VerdictKind,
)
from relax.config.run import BusConfig
from relax.types import PolicyVersion

pytestmark = pytest.mark.ray


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


@pytest.fixture
def own_bus(private_ray: str, bus_config: BusConfig) -> Iterator[BusAddress]:
    """A small bus that the test may fill or break."""
    address = start_bus(private_ray, bus_config.model_copy(update={"max_rows": 16}))
    yield address
    destroy_bus(address)


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


async def test_an_expired_lease_is_redelivered_to_a_waiting_consumer(
    bus_address: BusAddress, bus_config: BusConfig
) -> None:
    client = await connect(bus_address, bus_config, "all")
    name = unique("s")
    await client.admit([group(name, 0)], 30)
    request = LeaseRequest("rollout", ("prompt",), ttl_s=0.5)
    first = await client.lease(request, wait_s=30)
    assert isinstance(first, Lease)
    second = await asyncio.wait_for(client.lease(request, wait_s=60), 30)
    assert isinstance(second, Lease)
    assert second.groups[0].group_id == name
    with pytest.raises(LeaseLost):
        await client.put([sample(name, 0)], lease_id=first.lease_id, deadline_s=30)
    await client.drop(name, "test over")
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


@pytest.mark.parametrize("when", ["waiting", "reading"])
async def test_a_cancelled_lease_call_takes_no_work_with_it(
    bus_address: BusAddress, bus_config: BusConfig, when: str
) -> None:
    client = await connect(bus_address, bus_config, "all")
    name = unique("s")
    if when == "reading":
        await client.admit([group(name, 0)], 30)
    read = client._core._store.read
    reading = threading.Event()

    async def endless(columns: tuple[str, ...], slots: list[int]) -> dict[tuple[int, str], Any]:
        reading.set()
        await asyncio.Event().wait()
        return {}

    client._core._store.read = endless
    request = LeaseRequest("rollout", ("prompt",), lease_id=uuid.uuid4().hex)
    call = asyncio.create_task(client.lease(request, wait_s=60))
    if when == "reading":
        assert await asyncio.to_thread(reading.wait, 30)
    else:
        while request.lease_id not in inside(
            bus_address, bus_address.engine, lambda host: [*host._engine._waiting_for]
        ):
            await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.wait([call])
    client._core._store.read = read
    if when == "waiting":
        await client.admit([group(name, 0)], 30)
    lease = await client.lease(LeaseRequest("rollout", ("prompt",)), wait_s=10)
    assert isinstance(lease, Lease), "sooner than the time to live of the lost lease"
    assert lease.groups[0].group_id == name
    await client.drop(name, "test over")
    await client.close()


async def test_an_old_incarnation_is_fenced(bus_address: BusAddress, bus_config: BusConfig) -> None:
    name = unique("s")
    old = await connect(bus_address, bus_config, "twice")
    await old.admit([group(name, 0)], 30)
    lease = await old.lease(LeaseRequest("rollout", ("prompt",)), wait_s=30)
    assert isinstance(lease, Lease)
    new = await connect(bus_address, bus_config, "twice")
    assert new.caller.incarnation == old.caller.incarnation + 1
    with pytest.raises(Fenced):
        await old.put([sample(name, 0)], lease_id=lease.lease_id, deadline_s=30)
    again = await new.lease(LeaseRequest("rollout", ("prompt",)), wait_s=30)
    assert isinstance(again, Lease)
    assert again.groups[0].group_id == name
    await new.drop(name, "test over")
    await new.release(again.lease_id, DRAIN)
    await old.close()
    await new.close()


async def test_a_second_value_of_a_field_is_refused_and_counted(bus_address: BusAddress, bus_config: BusConfig) -> None:
    client = await connect(bus_address, bus_config, "all")
    name = unique("s")
    await client.admit([group(name, 0)], 30)
    lease = await client.lease(LeaseRequest("rollout", ("prompt",)), wait_s=30)
    assert isinstance(lease, Lease)
    puts = [
        await client.put([sample(name, 0, seed=seed)], lease_id=lease.lease_id, deadline_s=30) for seed in (0, 0, 1)
    ]
    assert [(p.stored, p.repeated, len(p.refused)) for p in puts] == [(5, 0, 0), (0, 5, 0), (0, 3, 2)]
    assert {reason for _, reason in puts[2].refused} == {"digest"}
    reading = await client.lease(LeaseRequest("reward", ("tokens",)), wait_s=30)
    assert isinstance(reading, Lease)
    assert np.array_equal(reading.rows[0].array("tokens"), sample(name, 0).fields["tokens"])
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


async def test_the_work_of_a_killed_process_is_redelivered(bus_address: BusAddress, bus_config: BusConfig) -> None:
    client = await connect(bus_address, bus_config, "all")
    name = unique("s")
    await client.admit([group(name, 0)], 30)
    spec = {
        "ray": ray.get_runtime_context().gcs_address,
        "namespace": bus_address.namespace,
        "address": dataclasses.asdict(bus_address),
        "config": bus_config.model_dump(),
    }
    script = Path(__file__).with_name("bus_traffic.py")
    victim = subprocess.Popen(
        [sys.executable, str(script), json.dumps(spec)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert victim.stdout is not None
    assert (await asyncio.to_thread(victim.stdout.readline)).strip() == name
    request = LeaseRequest("rollout", ("prompt",))
    assert isinstance(await client.lease(request, wait_s=4.5), Empty), "kept alive"
    victim.send_signal(signal.SIGKILL)
    victim.wait(10)
    lease = await client.lease(request, wait_s=60)
    assert isinstance(lease, Lease)
    assert lease.groups[0].group_id == name
    await client.drop(name, "test over")
    await client.close()


async def test_calls_fail_with_a_typed_error_when_a_process_of_the_bus_dies(
    own_bus: BusAddress, bus_config: BusConfig
) -> None:
    client = await connect(own_bus, bus_config, "all")
    gone = (BusUnavailable, BusTimeout)
    await client.admit([group("s:0:0", 0)], 30)
    lease = await client.lease(LeaseRequest("rollout", ("prompt",)), wait_s=30)
    assert isinstance(lease, Lease)
    await asyncio.to_thread(kill, own_bus, own_bus.stores[0])
    with pytest.raises(gone):
        await client.admit([group("s:0:1", 1)], 1.0)
    with pytest.raises(gone):
        await asyncio.to_thread(ping, own_bus, 5.0)
    waiting = asyncio.create_task(client.lease(LeaseRequest("reward", ("tokens",)), wait_s=60))
    await asyncio.to_thread(kill, own_bus, own_bus.engine)
    with pytest.raises(BusUnavailable):
        await asyncio.wait_for(waiting, 30)
    with pytest.raises(gone):
        await client.put([sample("s:0:0", 0)], lease_id=lease.lease_id, deadline_s=30)
    with pytest.raises(gone):
        await client.stats()
    with pytest.raises(gone):
        await asyncio.to_thread(ping, own_bus, 5.0)
    await client.close()


async def test_a_call_of_another_epoch_is_refused(bus_address: BusAddress, bus_config: BusConfig) -> None:
    client = await connect(bus_address, bus_config, "all")
    engine = ray.get_actor(bus_address.engine, namespace=bus_address.namespace)
    stranger = Caller(client.caller.owner, client.caller.incarnation, "epoch of yesterday")
    assert isinstance(await engine.call.remote("extend", stranger, "x"), StaleEpoch)
    client._core.caller = stranger
    with pytest.raises(StaleEpoch):
        await client.gc(1)
    await client.close()


async def test_a_closed_bus_says_so_and_one_created_again_is_open_empty_and_of_a_new_epoch(
    private_ray: str, bus_config: BusConfig
) -> None:
    """behaviour: B17"""
    address = start_bus(private_ray, bus_config)
    with pytest.raises(BusUnavailable):
        start_bus(private_ray, bus_config, address.run_id)
    client = await connect(address, bus_config, "all")
    request = LeaseRequest("rollout", ("prompt",))
    assert await client.lease(request, wait_s=0) == Empty("none")
    await client.admit([group("s:0:0", 0)], 30)
    await generate(client)
    waiting = asyncio.create_task(client.lease(request, wait_s=30))
    await client.close_topic("prompts")
    assert await waiting == Closed("rollout")
    destroy_bus(address)
    again = start_bus(private_ray, bus_config, address.run_id)
    assert again == address
    with pytest.raises((BusUnavailable, BusTimeout)):
        await client.stats()
    fresh = await connect(again, bus_config, "all")
    assert fresh.caller.epoch != client.caller.epoch
    assert (await fresh.stats()).open_groups == 0
    assert await fresh.lease(request, wait_s=0) == Empty("none")
    await client.close()
    await fresh.close()
    destroy_bus(again)


async def test_there_is_no_bus_to_attach_to(private_ray: str, bus_config: BusConfig) -> None:
    address = BusAddress("none", private_ray, "bus-none-engine", ())
    with pytest.raises(BusUnavailable, match="no bus"):
        await BusClient.connect(address, owner="x", role="test", config=bus_config, deadline_s=0.5)


async def test_a_corrupt_row_is_found_by_the_reader_and_given_back(
    bus_address: BusAddress, bus_config: BusConfig
) -> None:
    name = unique("s")
    client = await connect(bus_address, bus_config, "all")
    await client.admit([group(name, 0, size=1)], 30)
    await generate(client)
    request = LeaseRequest("reward", ("tokens",), lease_id="peek")
    grant = await client._core.call("lease", request, 0.0)
    ref = grant.rows[0].blobs[0]
    await client.release("peek", DRAIN)
    other = pack(f"{name}/0/0", [encode_field(f"{name}/0/0", "tokens", np.zeros(8, np.int32))])
    await client._loop.run(client._core._store.write(ref.column, [ref.slot], [other]))
    with pytest.raises(CorruptRow):
        await client.lease(LeaseRequest("reward", ("tokens",)), wait_s=30)
    assert not [held for held in (await client.stats()).held if held.owner == client.caller.owner]
    await client.drop(name, "test over")
    await client.close()


async def test_a_commit_that_the_engine_does_not_confirm_is_no_success(
    bus_address: BusAddress, bus_config: BusConfig
) -> None:
    """The notice is lost: the put does not return as if it were visible, and may be repeated."""
    name = unique("s")
    client = await connect(bus_address, bus_config.model_copy(update={"rpc_timeout_s": 2.0}), "all")
    commit = client._core._store.commit

    async def lost(body: object) -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    client._core._store.commit = lost
    with pytest.raises(BusTimeout):
        await client.admit([group(name, 0)], 4.0)
    assert isinstance(await client.lease(LeaseRequest("rollout", ("prompt",)), wait_s=0), Empty)
    client._core._store.commit = commit
    assert (await client.admit([group(name, 0)], 30)).admitted == 1
    await client.drop(name, "test over")
    await client.close()


async def test_a_commit_whose_answer_is_lost_counts_once(bus_address: BusAddress, bus_config: BusConfig) -> None:
    """behaviour: B16"""
    name = unique("s")
    client = await connect(bus_address, bus_config.model_copy(update={"rpc_timeout_s": 3.0}), "all")
    await client.admit([group(name, 0)], 30)
    lease = await client.lease(LeaseRequest("rollout", ("prompt",)), wait_s=30)
    assert isinstance(lease, Lease)
    before = (await client.stats()).account.produced
    commit = client._core._store.commit
    lost = []

    async def answer_lost_once(body: dict[str, object]) -> dict[str, object]:
        answer: dict[str, object] = await commit(body)
        if not lost:
            lost.append(answer)
            await asyncio.Event().wait()
        return answer

    client._core._store.commit = answer_lost_once
    result = await client.put([sample(name, 0)], lease_id=lease.lease_id, deadline_s=60)
    assert (result.stored, result.repeated) == (0, 5)
    assert (await client.stats()).account.produced == before + 1
    await client.drop(name, "test over")
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
    store = client._core._store

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
    client.set_version(PolicyVersion(1), 1)
    assert client.ack(batch.lease_id, tags={"step": 9}).acked == 1
    trained = client.stats().account.trained
    assert client.rollback(8) == (name,)
    assert client.stats().account.trained == trained - 2
    with pytest.raises(BusError, match="only grow"):
        client.set_version(PolicyVersion(0), 0)
    assert client.drop(name, "test over")
    client.close()


async def test_ping_answers_with_the_epoch(bus_address: BusAddress, bus_config: BusConfig) -> None:
    client = await connect(bus_address, bus_config, "all")
    assert await asyncio.to_thread(ping, bus_address, 10.0) == client.caller.epoch
    await client.close()

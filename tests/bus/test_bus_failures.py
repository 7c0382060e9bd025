"""Dead processes, lost answers, stale callers and corrupt rows, with the real processes of the bus."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from bus_processes import inside, kill, unique
from bus_traffic import TRAIN_FIELDS, connect, generate, group, sample, score, start_bus

from bus.client import BusClient
from bus.codec import encode_field, pack
from bus.errors import BusTimeout, BusUnavailable, CorruptRow, Fenced, LeaseLost, StaleEpoch
from bus.lifecycle import destroy_bus, ping
from bus.records import (
    DRAIN,
    AckResult,
    BusAddress,
    Caller,
    Closed,
    Empty,
    Lease,
    LeaseRequest,
    TrainedStep,
    Verdict,
    VerdictKind,
)
from relax.config.run import BusConfig
from relax.types import PolicyVersion

pytestmark = pytest.mark.ray


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


@pytest.mark.parametrize("when", ["waiting", "reading"])
async def test_a_cancelled_lease_call_takes_no_work_with_it(
    bus_address: BusAddress, bus_config: BusConfig, when: str
) -> None:
    client = await connect(bus_address, bus_config, "all")
    name = unique("s")
    if when == "reading":
        await client.admit([group(name, 0)], 30)
    read = client._core._at.store.read
    reading = threading.Event()

    async def endless(columns: tuple[str, ...], slots: list[int]) -> dict[tuple[int, str], Any]:
        reading.set()
        await asyncio.Event().wait()
        return {}

    client._core._at.store.read = endless
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
    client._core._at.store.read = read
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
    client._core._at.caller = stranger
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


@pytest.mark.parametrize("notices", ["itself", "elsewhere"])
async def test_what_is_under_way_when_a_bus_is_replaced_fails_with_its_error(
    private_ray: str, bus_config: BusConfig, notices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B16. Soon, whether or not another task notices the loss, and with an error: a cancellation
    would end the caller's loop without a word.
    """
    if notices == "elsewhere":
        monkeypatch.setattr("bus.core._ENGINE_CHECK_S", 60.0)
    address = start_bus(private_ray, bus_config)
    client = await connect(address, bus_config, "all")
    lost = client.caller
    await asyncio.to_thread(kill, address, address.stores[0])
    put = asyncio.create_task(client.admit([group("s:0:0", 0)], 60))
    while not client._core._at._transfers:
        await asyncio.sleep(0.05)
    destroy_bus(address)
    start_bus(private_ray, bus_config, address.run_id)
    if notices == "elsewhere":
        await client.reattach(lost, deadline_s=30)
    with pytest.raises(BusUnavailable, match="another one" if notices == "elsewhere" else "gone"):
        await asyncio.wait_for(put, 10)
    await client.reattach(lost, deadline_s=30)
    assert (await client.stats()).open_groups == 0
    await client.admit([group("s:0:0", 0)], 30)
    assert (await client.stats()).open_groups == 1
    await client.close()
    destroy_bus(address)


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
    await client._loop.run(client._core._at.store.write(ref.column, [ref.slot], [other]))
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
    commit = client._core._at.store.commit

    async def lost(body: object) -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    client._core._at.store.commit = lost
    with pytest.raises(BusTimeout):
        await client.admit([group(name, 0)], 4.0)
    assert isinstance(await client.lease(LeaseRequest("rollout", ("prompt",)), wait_s=0), Empty)
    client._core._at.store.commit = commit
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
    commit = client._core._at.store.commit
    lost = []

    async def answer_lost_once(body: dict[str, object]) -> dict[str, object]:
        answer: dict[str, object] = await commit(body)
        if not lost:
            lost.append(answer)
            await asyncio.Event().wait()
        return answer

    client._core._at.store.commit = answer_lost_once
    result = await client.put([sample(name, 0)], lease_id=lease.lease_id, deadline_s=60)
    assert (result.stored, result.repeated) == (0, 5)
    assert (await client.stats()).account.produced == before + 1
    await client.drop(name, "test over")
    await client.close()


async def test_a_step_whose_commit_got_no_answer_is_committed_once(
    bus_address: BusAddress, bus_config: BusConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B16"""
    name = unique("s")
    client = await connect(bus_address, bus_config, "all")
    await client.admit([group(name, 0)], 30)
    await generate(client)
    await score(client, 2)
    await client.judge([Verdict(name, VerdictKind.ACCEPTED)])
    lease = await client.lease(
        LeaseRequest("actor", TRAIN_FIELDS, version=PolicyVersion(0), slots_left=1, groups_per_step=1), wait_s=30
    )
    assert isinstance(lease, Lease)
    trained = (await client.stats()).account.trained
    commit = client._core.commit_step
    calls: list[int] = []

    async def answer_lost_once(trained: TrainedStep, lease_ids: Sequence[str]) -> AckResult:
        result = await commit(trained, lease_ids)
        calls.append(trained.step)
        if len(calls) == 1:
            raise BusTimeout("the answer is lost")
        return result

    monkeypatch.setattr(client._core, "commit_step", answer_lost_once)
    for _ in range(2):
        with contextlib.suppress(BusTimeout):
            await client.commit_step(TrainedStep(1, 1, {name: len(lease.rows)}), [lease.lease_id])
    stats = await client.stats()
    assert len(calls) == 2
    assert (stats.account.trained, stats.version) == (trained + len(lease.rows), 1)
    await client.gc(1)
    await client.close()

"""Cost of the bus against raw TransferQueue, and against itself with more rows resident.

    python -m benchmarks.bus --json

One cycle of ours: put a micro-batch under a lease, lease it, read it, acknowledge it, with verified
visibility and digests. One cycle raw: put, get_meta, get_data of the same rows as one column per
field, no acknowledgement. Both run in the same Ray, interleaved; figures are medians over reps.

`ratio` is ours over raw; `growth` is ours with `--many` over ours with `--few` rows resident; `flat` is ours after
`--passed` rows have gone through a bus and been freed, over ours on a fresh one (see `benchmarks.bus_flat`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

FIELDS = ("tokens", "loss_mask", "rollout_logprobs", "versions", "ref_logprobs")
GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--rows", type=int, default=32, help="rows of a micro-batch")
    parser.add_argument(
        "--tokens", type=int, default=4096, help="longest row, in tokens; lengths are uniform in [1/2, 1] of it"
    )
    parser.add_argument("--reps", type=int, default=30)
    parser.add_argument("--few", type=int, default=1_000)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--passed", type=int, default=100_000)
    options = parser.parse_args()
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    import ray

    # Ray puts unix sockets below it, whose paths are short by law.
    folder = tempfile.mkdtemp(prefix="rx", dir="/tmp")
    ray.init(num_cpus=8, include_dashboard=False, _temp_dir=folder, namespace="bench", log_to_driver=False)
    try:
        figures = asyncio.run(measure(options)) | asyncio.run(measure_flat(options))
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>24}: {value}")


async def measure(options: argparse.Namespace) -> dict[str, float | int]:
    from bus.client import BusClient
    from bus.lifecycle import create_bus, destroy_bus
    from relax.config.run import BusConfig

    config = BusConfig(max_rows=4 * options.many, max_bytes=64 << 30, partition_rows=8192, rpc_timeout_s=60)
    address = create_bus("bench", "bench", config, options.tokens, complete_fields=("reward",), deadline_s=300)
    client = await BusClient.connect(address, owner="bench", role="bench", config=config, deadline_s=60)
    try:
        ours = Ours(client, options.rows, options.tokens)
        raw = await asyncio.to_thread(Raw, options.rows, options.tokens)
        for _ in range(3):
            await ours.cycle()
            await asyncio.to_thread(raw.cycle)
        times: dict[str, list[float]] = {"ours": [], "raw": []}
        for _ in range(options.reps):
            times["ours"].append(await ours.cycle())
            times["raw"].append(await asyncio.to_thread(raw.cycle))
        raw.close()
        resident = {}
        for count in (options.few, options.many):
            await ours.fill(count)
            await ours.cycle()
            resident[count] = statistics.median([await ours.cycle() for _ in range(options.reps)])
    finally:
        await client.close()
        destroy_bus(address)
    ours_ms, raw_ms = (1e3 * statistics.median(times[name]) for name in ("ours", "raw"))
    few_ms, many_ms = 1e3 * resident[options.few], 1e3 * resident[options.many]
    return {
        "ratio": round(ours_ms / raw_ms, 3),
        "growth": round(many_ms / few_ms, 3),
        "ours_ms": round(ours_ms, 2),
        "raw_ms": round(raw_ms, 2),
        "ours_min_ms": round(1e3 * min(times["ours"]), 2),
        "raw_min_ms": round(1e3 * min(times["raw"]), 2),
        "few_ms": round(few_ms, 2),
        "many_ms": round(many_ms, 2),
        "few_rows": options.few,
        "many_rows": options.many,
        "rows": options.rows,
        "tokens": options.tokens,
        "fields": len(FIELDS),
        "reps": options.reps,
    }


async def measure_flat(options: argparse.Namespace) -> dict[str, float | int]:
    from benchmarks.bus_flat import Passing, compare
    from bus.client import BusClient
    from bus.lifecycle import create_bus, destroy_bus
    from relax.config.run import BusConfig

    config = BusConfig(max_rows=8192, max_bytes=8 << 30, partition_rows=8192, rpc_timeout_s=60)
    made = []
    try:
        for name in ("worn", "fresh"):
            address = create_bus(name, "bench", config, options.tokens, complete_fields=("reward",), deadline_s=300)
            client = await BusClient.connect(address, owner=name, role="bench", config=config, deadline_s=60)
            made.append((address, client, Passing(client), Ours(client, options.rows, options.tokens, seq=1 << 40)))
        passed = await made[0][2].rows(options.passed)

        def cycle(which: int) -> Callable[[], Awaitable[float]]:
            async def run() -> float:
                _, _, passing, ours = made[which]
                elapsed = await ours.cycle()
                await passing.read_events()
                return elapsed

            return run

        worn_s, fresh_s = await compare(cycle(0), cycle(1), 2 * options.reps)
    finally:
        for address, client, _, _ in made:
            await client.close()
            destroy_bus(address)
    return {
        "flat": round(worn_s / fresh_s, 3),
        "worn_ms": round(1e3 * worn_s, 2),
        "fresh_ms": round(1e3 * fresh_s, 2),
        "passed_rows": passed,
    }


def batch(rows: int, tokens: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    """The same rows for both: lengths uniform in [tokens / 2, tokens]."""
    draw = np.random.default_rng(0)
    made = []
    for length in draw.integers(tokens // 2, tokens + 1, rows):
        made.append(
            {
                "tokens": draw.integers(0, 150_000, length).astype(np.int32),
                "loss_mask": draw.random(length) < 0.9,
                "rollout_logprobs": -draw.random(length, dtype=np.float32),
                "versions": np.zeros(length, dtype=np.int32),
                "ref_logprobs": -draw.random(length, dtype=np.float32),
            }
        )
    return made


class Ours:
    """The bus, as Rollout and Reward use it. Groups and their leases are made outside the clock."""

    def __init__(self, client: Any, rows: int, tokens: int, seq: int = 0) -> None:
        self._client = client
        self._rows = batch(rows, tokens)
        self._small = batch(GROUP, 16)
        self._seq = seq
        self._resident = 0

    async def cycle(self) -> float:
        from bus.records import Lease, LeaseRequest

        lease, puts = await self._groups(self._rows)
        started = time.perf_counter()
        await self._client.put(puts, lease_id=lease.lease_id, deadline_s=60)
        read = await self._client.lease(LeaseRequest("reward", FIELDS, max_items=len(puts)), wait_s=10)
        assert isinstance(read, Lease) and len(read.rows) == len(puts)
        await self._client.ack(read.lease_id)
        elapsed = time.perf_counter() - started
        await self._client.ack(lease.lease_id)
        for group in lease.groups:
            await self._client.drop(group.group_id, "measured")
        return elapsed

    async def fill(self, count: int) -> None:
        """Bring the rows that stay in the bus, waiting for a verdict, up to `count`."""
        from bus.records import LeaseRequest

        while self._resident < count:
            lease, puts = await self._groups(self._small * (min(256, count - self._resident) // GROUP or 1))
            await self._client.put(puts, lease_id=lease.lease_id, deadline_s=60)
            await self._client.ack(lease.lease_id)
            read = await self._client.lease(LeaseRequest("reward", FIELDS, max_items=len(puts)), wait_s=10)
            await self._client.ack(read.lease_id)
            self._resident += len(puts)

    async def _groups(self, rows: list[dict[str, np.ndarray[Any, Any]]]) -> tuple[Any, list[Any]]:
        from bus.records import GroupAdmission, Lease, LeaseRequest, RowPut

        count = -(-len(rows) // GROUP)
        ids = [f"bench:0:{self._seq + i}" for i in range(count)]
        admissions = [GroupAdmission(name, self._seq + i, GROUP, 0, {"text": name}) for i, name in enumerate(ids)]
        self._seq += count
        await self._client.admit(admissions, 60)
        lease = await self._client.lease(LeaseRequest("rollout", ("prompt",), max_items=count, ttl_s=600), wait_s=60)
        assert isinstance(lease, Lease) and len(lease.groups) == count
        puts = [
            RowPut(f"{ids[i // GROUP]}/{i % GROUP}/0", ids[i // GROUP], fields, {"tokens": len(fields["tokens"])})
            for i, fields in enumerate(rows)
        ]
        return lease, puts


class Raw:
    """TransferQueue as it comes: one jagged column per field, polling mode."""

    def __init__(self, rows: int, tokens: int) -> None:
        import torch
        import transfer_queue as tq
        from tensordict import TensorDict

        torch.set_num_threads(1)
        simple = {"num_data_storage_units": 1}
        tq.init({"controller": {"polling_mode": True}, "backend": {"SimpleStorage": simple}})
        self._tq = tq
        self._client = tq.get_client()
        made = batch(rows, tokens)
        self._count = rows
        columns = {
            name: torch.nested.as_nested_tensor([torch.from_numpy(row[name]) for row in made], layout=torch.jagged)
            for name in FIELDS
        }
        self._data = TensorDict(columns, batch_size=rows)

    def cycle(self) -> float:
        started = time.perf_counter()
        self._client.put(self._data, partition_id="bench")
        meta = self._client.get_meta(list(FIELDS), self._count, "bench", task_name="reward")
        data = self._client.get_data(meta)
        elapsed = time.perf_counter() - started
        assert meta.size == self._count and len(data) == self._count
        self._client.clear_samples(meta)
        return elapsed

    def close(self) -> None:
        self._tq.close()


if __name__ == "__main__":
    main()

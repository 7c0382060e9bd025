"""What a weight update costs an instance that is generating.

    python -m benchmarks.sync --json

A trainer in a process of its own publishes a version into memory every `--period` seconds; an embedded engine with 16
running sequences adopts it (read, verify, exchange between two decode steps, digest of the live weights).

- `stall_ms`: the longest time between two decode steps while an update ran, less the usual one; median over updates;
- `memcpy_ms`: copying the same tensors once, in this process; `stall_over_memcpy`: (stall_ms - 5) over it, at least 0;
- `aborted`: requests that an update ended;
- `generation_lost_share`: stall over the period, the share of time in which an instance stood still;
- `throughput_ratio`: tokens with an update in a period over tokens in periods without one (both cores are shared here
  with the trainer's process, so this is an upper bound of the loss).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import shutil
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine import BATCH, VOCAB, Letters
from benchmarks.models import parameters, random_qwen3
from relax.engines.embedded import EmbeddedEngine
from relax.engines.requests import FutureSink, Request
from relax.types import PolicyVersion, SamplingParams
from relax.weights.store import WeightStore

FREE_MS = 5.0
RESPONSE_TOKENS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--period", type=float, default=2.0, help="seconds between updates")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="relax-sync-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        figures = measure(folder, options.updates, options.period)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>24}: {value}")


def measure(folder: Path, updates: int, period_s: float) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    trainer = context.Process(target=publish, args=(folder, there), daemon=True)
    trainer.start()
    model = random_qwen3(VOCAB)
    engine = EmbeddedEngine(model, Letters(), eos_ids=[0], slots=BATCH, max_context=256, threads=1)
    load = Load(engine)
    try:
        engine.start()
        load.start()
        load.run(period_s)
        quiet, busy, stalls, seconds = [], [], [], []
        for version in range(1, updates + 1):
            quiet.append(load.run(period_s))
            here.send(version)
            published = here.recv()
            begin = time.perf_counter()
            update = threading.Thread(target=adopt, args=(engine, published, PolicyVersion(version)))
            mark = len(load.steps)
            update.start()
            busy.append(load.run(period_s))
            update.join(60)
            if engine.version != version:
                raise RuntimeError(f"version {version} was not adopted")
            seconds.append(engine.status().weight_load_s)
            stalls.append(longest_gap(load.steps[mark:], begin, begin + seconds[-1]))
        usual = statistics.median(np.diff(load.steps).tolist())
        stall_ms = max(0.0, 1e3 * (statistics.median(stalls) - usual))
        memcpy_ms = 1e3 * memcpy_s(model)
        aborted = engine.status().aborted_requests
    finally:
        load.stop()
        here.send(None)
        engine.close(30.0)
        trainer.join(30)
    return {
        "stall_over_memcpy": round(max(0.0, stall_ms - FREE_MS) / memcpy_ms, 3),
        "aborted": aborted,
        "generation_lost_share": round(stall_ms / 1e3 / period_s, 5),
        "stall_ms": round(stall_ms, 2),
        "memcpy_ms": round(memcpy_ms, 2),
        "usual_step_ms": round(1e3 * usual, 2),
        "exchange_ms": round(1e3 * engine.status().swap_stall_s / updates, 3),
        "adoption_ms": round(1e3 * statistics.median(seconds), 1),
        "throughput_ratio": round(statistics.median(busy) / statistics.median(quiet), 3),
        "parameters": parameters(model),
        "updates": updates,
        "period_s": period_s,
    }


class Load:
    """Keeps every slot of the engine busy, and notes when each decode step ended."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.steps: list[float] = []
        self._engine = engine
        self._sink = FutureSink()
        self._numbers = iter(range(1 << 30))
        self._stopped = False
        step = engine._scheduler.step

        def timed() -> Any:
            done = step()
            self.steps.append(time.perf_counter())
            return done

        engine._scheduler.step = timed  # type: ignore[method-assign]

    def start(self) -> None:
        for _ in range(2 * BATCH):
            self._ask()

    def stop(self) -> None:
        self._stopped = True

    def run(self, seconds: float) -> int:
        """Tokens generated meanwhile."""
        before = self._engine.status().generated_tokens
        time.sleep(seconds)  # the length of the measured window
        return self._engine.status().generated_tokens - before

    def _ask(self) -> None:
        number = next(self._numbers)
        prompt = np.random.default_rng(number).integers(3, VOCAB, 16).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=RESPONSE_TOKENS, ignore_eos=True, seed=number)
        request = Request(f"r{number}", prompt, sampling, number, self._sink)
        self._sink.expect(request).add_done_callback(lambda _: None if self._stopped else self._ask())
        self._engine.submit([request])


def adopt(engine: EmbeddedEngine, folder: str, version: PolicyVersion) -> None:
    engine.update_weights_from_disk(folder, version, 60.0)


def longest_gap(steps: list[float], begin: float, end: float) -> float:
    """Between two steps that touch [begin, end]."""
    gaps = [b - a for a, b in itertools.pairwise(steps) if b >= begin and a <= end]
    return max(gaps, default=0.0)


def memcpy_s(model: Any) -> float:
    tensors = [parameter.detach() for parameter in model.parameters()]
    targets = [torch.empty_like(tensor) for tensor in tensors]
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def publish(folder: Path, pipe: Connection) -> None:
    """The trainer's process: on each number a version, a little different from the last."""
    torch.set_num_threads(1)
    model = random_qwen3(VOCAB)
    store = WeightStore(folder, keep=2)
    while (version := pipe.recv()) is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0001)
        tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
        store.publish(PolicyVersion(version), version, tensors, 1 << 26)
        pipe.send(str(folder / f"v{version:08d}"))


if __name__ == "__main__":
    main()

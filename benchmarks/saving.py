"""How long a snapshot of the actor's state and the save of a checkpoint keep the training thread from its work.

    python -m benchmarks.saving --json

A model of 10.8M parameters with AdamW: weights and two moments, 130 MB. Both go through the actor's own `StateKeeper`;
in place of DCS a process of its own copies, digests and flushes the snapshot to disk, as DCS does, while this one goes
on to train. In turns, in one process:

- `memcpy_ms`: the tensors of the state copied once into memory that is touched already;
- `snapshot_ms`: one call of `take`, as after each step; `checkpoint_ms`: one call of `save`, which the actor
  makes when a checkpoint is due, right after `take`; `checkpoint_alone_ms`: the same where snapshots are off;
- `blocked_over_memcpy`: (ms - 10) over the memcpy, at least 0, by median: 1.5 is the limit;
- `saved_ms`: until a checkpoint was on disk.
"""

from __future__ import annotations

import argparse
import asyncio
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

import torch

from benchmarks.models import parameters, random_qwen3
from relax.checkpoint.snapshot import copy_snapshot, read_snapshot
from relax.checkpoint.store import CheckpointStore
from relax.config.actor import OptimConfig
from relax.training.state import TrainerState
from relax.training.torch_trainer import TorchTrainer
from services.actor.keeping import StateKeeper

FREE_MS = 10.0
ROUNDS = 9
SAVE_DEADLINE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    figures = measure(options.rounds)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>24}: {value}")


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """`blocked_over_memcpy`: {snapshot, checkpoint}, and what it was made from."""
    torch.set_num_threads(1)
    memory = Path(tempfile.mkdtemp(prefix="relax-saving-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="relax-saving-"))
    try:
        with Saver(memory, disk) as saver:
            return _measure(saver, memory, rounds)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)


def _measure(saver: Saver, memory: Path, rounds: int) -> dict[str, Any]:
    trainer = Trainer()
    keeper = StateKeeper(trainer, None, memory, saver.link, saver.reporter, saver.loop, saver.save)
    memcpy = Memcpy(trainer.state())
    times: dict[str, list[float]] = {name: [] for name in ("memcpy", "snapshot", "checkpoint", "checkpoint_alone")}
    step = 0
    for warm in range(-2, rounds):  # the first maps and touches the memory
        step += 2
        trainer.train()
        took = {"memcpy": timed(memcpy.run), "snapshot": timed(lambda at=step: keeper.take(at, {}))}  # type: ignore[misc]
        took["checkpoint"] = timed(lambda at=step: keeper.save(at, {}))  # type: ignore[misc]
        trainer.train()  # while it is being saved
        keeper.finish()
        took["checkpoint_alone"] = timed(lambda at=step + 1: keeper.save(at, {}))  # type: ignore[misc]
        keeper.finish()
        if warm >= 0:
            for name, seconds in took.items():
                times[name].append(1e3 * seconds)
    if saver.reporter.failed or keeper.saved != step + 1:
        raise RuntimeError(f"not saved: {saver.reporter.facts}")
    median = {name: statistics.median(values) for name, values in times.items()}
    over = {name: max(0.0, median[name] - FREE_MS) / median["memcpy"] for name in median if name != "memcpy"}
    return {
        "blocked_over_memcpy": {
            "snapshot": round(over["snapshot"], 3),
            "checkpoint": round(max(over["checkpoint"], over["checkpoint_alone"]), 3),
        },
        **{f"{name}_ms": round(value, 2) for name, value in median.items()},
        "saved_ms": round(1e3 * statistics.median(saver.seconds), 1),
        "state_mb": round(trainer.state().n_bytes / 1e6, 1),
        "parameters": parameters(trainer.model),
        "rounds": rounds,
    }


def timed(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Memcpy:
    """Copies the tensors of a state, once a run."""

    def __init__(self, state: TrainerState) -> None:
        self._sources = list(state.tensors.values())
        self._targets = [torch.zeros_like(tensor) for tensor in self._sources]

    def run(self) -> None:
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)


class Trainer(TorchTrainer):
    """The actor's trainer, with a step of a fixed small batch."""

    def __init__(self) -> None:
        self.model = random_qwen3()
        super().__init__(self.model, _no_score, OptimConfig(), total_updates=1000)
        self._tokens = torch.randint(0, 512, (4, 64))

    def train(self) -> None:
        self.model(input_ids=self._tokens).logits.square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def _no_score(
    tokens: torch.Tensor, wanted: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("this benchmark computes no losses")


class Saver:
    """Stands in for DCS, the bus and the replica around a `StateKeeper`: its `loop` in a thread, as a replica's is."""

    def __init__(self, memory: Path, disk: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.reporter, self.link = Counts(), Link()
        self.seconds: list[float] = []
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(memory, disk, theirs), daemon=True
        )

    def __enter__(self) -> Saver:
        self._thread.start()
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()

    async def save(self, step: int, buffer: str) -> None:
        await asyncio.to_thread(self._ask, step, buffer)

    def _ask(self, step: int, buffer: str) -> None:
        self._pipe.send((step, buffer))
        if not self._pipe.poll(SAVE_DEADLINE_S):
            raise TimeoutError(f"no checkpoint within {SAVE_DEADLINE_S:g} s")
        self.seconds.append(self._pipe.recv())


def serve(memory: Path, disk: Path, pipe: Connection) -> None:
    """What DCS does: each snapshot that is asked for becomes a checkpoint."""
    store = CheckpointStore(disk)
    while (asked := pipe.recv()) is not None:
        step, buffer = asked
        begin = time.perf_counter()
        snapshot = read_snapshot(memory / buffer)
        if snapshot is None or snapshot.step != step:
            raise RuntimeError(f"{memory / buffer} holds no snapshot of step {step}")
        store.save(step, lambda folder, of=snapshot: copy_snapshot(of, folder), {}, expected_bytes=snapshot.n_bytes)  # type: ignore[misc]
        pipe.send(time.perf_counter() - begin)


class Counts:
    """In place of a replica's reporter."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.trace = self
        self.failed = 0

    def count(self, name: str, amount: float = 1.0) -> None:
        self.failed += name.endswith("_failed")

    def add(self, *_: object, **__: object) -> None:
        """A span."""


class Link:
    """In place of the bus, which collects what a checkpoint covers."""

    def __init__(self) -> None:
        self.bus = self

    async def gc(self, step: int) -> None:
        return None

    async def until_done(self, work: Any) -> None:
        await work()


if __name__ == "__main__":
    main()

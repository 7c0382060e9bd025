"""The keeper of the actor's state: which step is saved, and what happens where there is no room."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from relax.checkpoint.snapshot import newest_snapshot
from relax.checkpoint.store import CheckpointStore
from relax.config.roles import RetentionConfig
from relax.training.state import POLICY, TrainerState, join_states, read_state, write_state
from relax.weights import space
from services.actor import keeping
from services.actor.keeping import StateKeeper
from services.dcs.api import SavedState


class Policy:
    """Its state is one number."""

    def __init__(self) -> None:
        self.value = 0.0

    def state(self) -> TrainerState:
        return TrainerState({"w": torch.full((8,), self.value)}, {"updates": int(self.value)})

    def load_state(self, saved: TrainerState, where: str) -> None:
        self.value = float(saved.tensors["w"][0])


class Reporter:
    """A replica's, without Serve around it."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.facts: dict[str, Any] = {}
        self.trace = self

    def count(self, name: str, amount: float = 1.0) -> None:
        self.counters[name] += int(amount) if amount >= 1 else 0

    def add(self, *_: object, **__: object) -> None:
        """A span."""


class Link:
    """A bus that has nothing to collect."""

    def __init__(self) -> None:
        self.bus = self
        self.collected: list[int] = []

    async def gc(self, step: int) -> None:
        self.collected.append(step)

    async def until_done(self, work: Any) -> None:
        await work()


class Kept:
    def __init__(self, root: Path, loop: asyncio.AbstractEventLoop):
        self.policy, self.reporter, self.link = Policy(), Reporter(), Link()
        self.asked: list[tuple[int, str]] = []
        self.keeper = StateKeeper(self.policy, None, root, self.link, self.reporter, loop, self._save)  # type: ignore[arg-type]
        self.root = root

    async def _save(self, step: int, buffer: str) -> None:
        snapshot = newest_snapshot(self.root)
        assert snapshot is not None and (snapshot.step, snapshot.buffer) == (step, buffer)
        self.asked.append((step, buffer))


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


@pytest.fixture
def kept(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> Kept:
    return Kept(tmp_path / "memory", loop)


def test_it_knows_which_step_is_saved_so_that_a_stop_does_not_save_it_twice(kept: Kept) -> None:
    kept.keeper.take(3, {})
    assert kept.keeper.saved is None, "a snapshot is no checkpoint"
    kept.keeper.save(3, {})
    kept.keeper.finish()
    assert kept.keeper.saved == 3 and kept.link.collected == [3]
    kept.keeper.take(4, {})
    kept.keeper.save(5, {})
    kept.keeper.finish()
    assert [step for step, _ in kept.asked] == [3, 5] and kept.keeper.saved == 5


def test_without_room_for_snapshots_training_goes_on_and_is_told(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """behaviour: B47"""
    monkeypatch.setattr(space, "free_bytes", lambda folder: 10)
    kept.keeper.take(1, {})
    kept.keeper.save(1, {})
    assert kept.reporter.counters == {"snapshots_failed": 2, "checkpoints_failed": 1} and kept.asked == []
    assert "no space for snapshots" in kept.reporter.facts["checkpoint_error"]
    monkeypatch.undo()
    kept.keeper.save(2, {})
    kept.keeper.finish()
    assert kept.keeper.saved == 2, "once there is room again, the next one is saved"


def test_a_checkpoint_that_it_loads_is_not_removed_meanwhile(
    tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when DCS still saves what the actor before it had asked for."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=RetentionConfig(newest=1))
    state = join_states({POLICY: TrainerState({"w": torch.full((8,), 9.0)}, {"updates": 9})})
    folder = store.folder(store.save(9, lambda folder: write_state(state, folder), {}))

    def save_and_read(folder: Path) -> TrainerState:
        store.save(10, lambda folder: write_state(state, folder), {})
        return read_state(folder)

    monkeypatch.setattr(keeping, "read_state", save_and_read)
    kept.keeper.load(SavedState(9, str(folder)))
    assert kept.policy.value == 9.0 and kept.keeper.saved == 9
    store.save(11, lambda folder: write_state(state, folder), {})
    assert not folder.exists()

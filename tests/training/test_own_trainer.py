from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relax.config.actor import ActorConfig
from relax.config.run import RunConfig
from relax.plugins import PluginError
from relax.training.batching import TrainRow
from relax.training.own_trainer import OwnTrainerStep, build_step
from relax.training.step import StepTrainer
from relax.training.torch_backend import TorchBackend
from relax.types import PolicyVersion

OWN = '''
from dataclasses import replace

from relax.algorithms import build_loss
from relax.config.algorithm import AlgorithmConfig


class Imitate:
    """Supervised training on the samples with the best reward."""

    def __init__(self, context):
        self.context = context
        self.loss = build_loss(AlgorithmConfig(name="sft"))

    def train(self, trajectories):
        best = max(row.reward for row in trajectories)
        rows = [row for row in trajectories if row.reward == best]
        result = self.context.backend.step(self.context.batches(rows), self.loss)
        return {"loss": result.loss, "grad_norm": result.grad_norm, "own_kept": len(rows)}


class Broken(Imitate):
    def train(self, trajectories):
        return {"loss": float("nan")}


class NoTrain:
    def __init__(self, context): ...


class TwoArguments:
    def __init__(self, context): ...
    def train(self, trajectories, step): ...


class NoContext:
    def __init__(self): ...
    def train(self, trajectories): ...
'''
V0 = PolicyVersion(0)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def build(backend: TorchBackend, trainer: str | None) -> Any:
    return build_step(RunConfig(groups_per_step=4, group_size=3), ActorConfig(trainer=trainer), backend, None, None)


def test_an_own_trainer_gets_the_steps_rows_and_gives_its_metrics(
    own: Path, make_backend: Callable[..., TorchBackend], make_rows: Callable[..., list[TrainRow]]
) -> None:
    backend = make_backend()
    step = build(backend, f"{own}:Imitate")
    assert isinstance(step, OwnTrainerStep)
    rows = make_rows(12, reward=0.5)
    asked: list[int] = []

    def supply(n: int) -> Iterator[list[TrainRow]]:
        asked.append(n)
        yield rows[:6]
        yield rows[6:]

    outcome = step.train(supply, 0, V0)
    assert outcome is not None and asked == [4]
    assert outcome.result.stats == {"own_kept": 12.0} and outcome.result.loss > 0 and outcome.result.n_rows == 12
    assert backend.describe()["updates"] == 1
    assert step.train(lambda n: iter(()), 1, V0) is None


def test_without_one_the_algorithm_trains(make_backend: Callable[..., TorchBackend]) -> None:
    assert isinstance(build(make_backend(), None), StepTrainer)


def test_a_metric_that_is_no_number_is_refused(
    own: Path, make_backend: Callable[..., TorchBackend], make_rows: Callable[..., list[TrainRow]]
) -> None:
    step = build(make_backend(), f"{own}:Broken")
    with pytest.raises(PluginError, match="loss = nan"):
        step.train(lambda n: iter([make_rows(3)]), 0, V0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoTrain", r"has no `train\(self, trajectories\)`"),
        ("TwoArguments", r"must take exactly \(self, trajectories\)"),
        ("NoContext", r"must take exactly \(context\)"),
        ("Imitat", "did you mean 'Imitate'"),
    ],
)
def test_the_interface_is_checked_at_start(
    own: Path, make_backend: Callable[..., TorchBackend], name: str, words: str
) -> None:
    with pytest.raises(PluginError, match=words):
        build(make_backend(), f"{own}:{name}")

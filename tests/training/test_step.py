"""One step over a real backend: streamed or collected, in one update or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.config.actor import ActorConfig, CriticConfig, OptimConfig
from relax.config.algorithm import AlgorithmConfig
from relax.config.run import RunConfig
from relax.training.base import NonFiniteUpdate
from relax.training.batching import TrainRow
from relax.training.critic import TorchCritic
from relax.training.step import StepTrainer, Supply, mini_batches
from relax.training.torch_backend import TorchBackend
from relax.types import PolicyVersion, group_of

MakeBackend = Callable[..., TorchBackend]
MakeRows = Callable[..., list[TrainRow]]
GROUPS = 4
V0 = PolicyVersion(0)
OPTIM = {"eps": 1e-3, "lr": 1e-2, "clip_grad_norm": None}


def in_portions(rows: Sequence[TrainRow], groups: int) -> Supply:
    """Hands out `groups` groups at a time; remembers over calls what is left."""
    order = list(dict.fromkeys(group_of(row.row_id) for row in rows))
    left = [[row for row in rows if group_of(row.row_id) == group] for group in order]

    def supply(n: int) -> Iterator[list[TrainRow]]:
        while n > 0 and left:
            portion = [left.pop(0) for _ in range(min(n, groups, len(left)))]
            n -= len(portion)
            yield [row for group in portion for row in group]

    return supply


def trainer(
    backend: TorchBackend, algorithm: AlgorithmConfig, critic_model: TorchCritic | None = None, **actor: Any
) -> StepTrainer:
    run = RunConfig(groups_per_step=GROUPS, group_size=3)
    return StepTrainer(run, ActorConfig(algorithm=algorithm, **actor), backend, critic_model, Path.cwd())


def scored_rows(make_rows: MakeRows, seed: int = 0) -> list[TrainRow]:
    draw = np.random.default_rng(seed)
    return [replace(row, advantage=0.0, reward=float(draw.random())) for row in make_rows(3 * GROUPS, seed=seed)]


def parameters(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.state_tensors()}


@pytest.mark.parametrize("name", ["grpo", "dapo", "reinforce_pp", "reinforce_pp_baseline", "m2po"])
def test_a_step_is_the_same_in_whatever_portions_its_groups_arrive(
    name: str, make_backend: MakeBackend, make_rows: MakeRows
) -> None:
    """behaviour: B25. Whitening and the second-moment mask are those of the step, not of a portion."""
    rows, results = scored_rows(make_rows), []
    for portion, order in ((GROUPS, 1), (1, 1), (1, -1), (3, 1)):
        backend = make_backend(OPTIM)
        algorithm = AlgorithmConfig(name=name, **({"m2_threshold": 0.3} if name == "m2po" else {}))
        step = trainer(backend, algorithm, micro_batch_tokens=10_000 if portion == GROUPS else 30)
        outcome = step.train(in_portions(rows[::order], portion), 0, V0)
        assert outcome is not None
        results.append((outcome.result, parameters(backend)))
    (first, expected), others = results[0], results[1:]
    assert first.grad_norm > 1e-3
    for result, found in others:
        assert result.loss == pytest.approx(first.loss, abs=1e-6)
        assert dict(result.stats) == pytest.approx(dict(first.stats), abs=1e-5)
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-6, rtol=0)


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_step(
    make_backend: MakeBackend, make_rows: MakeRows
) -> None:
    """behaviour: B27"""
    step = trainer(make_backend(), AlgorithmConfig(name="reinforce_pp"))
    rows = step._prepared(scored_rows(make_rows), V0)
    tokens = np.concatenate([np.asarray(row.advantage)[row.loss_mask] for row in rows])
    assert tokens.mean() == pytest.approx(0, abs=1e-6) and tokens.std() == pytest.approx(1, abs=1e-5)


def test_a_streamed_step_computes_before_the_last_group_is_there(
    make_backend: MakeBackend, make_rows: MakeRows
) -> None:
    """The supply sees that the first micro-batch was computed when it is asked for the second portion."""
    backend = make_backend()
    computed: list[int] = []
    seen: list[int] = []
    accumulate = backend._accumulate
    backend._accumulate = lambda *a: (computed.append(1), accumulate(*a))[1]  # type: ignore[method-assign]
    inner = in_portions(scored_rows(make_rows), 1)

    def supply(n: int) -> Iterator[list[TrainRow]]:
        for portion in inner(n):
            seen.append(len(computed))
            yield list(portion)

    trainer(backend, AlgorithmConfig(name="grpo")).train(supply, 0, V0)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_mini_batches_are_updates_of_their_own(name: str, make_backend: MakeBackend, make_rows: MakeRows) -> None:
    backend = make_backend(OPTIM)
    outcome = trainer(backend, AlgorithmConfig(name=name, mini_batches=2)).train(
        in_portions(scored_rows(make_rows), 1), 0, V0
    )
    assert outcome is not None and outcome.updates == 2 == backend.describe()["updates"]
    assert outcome.result.n_rows == 3 * GROUPS


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_a_step_of_several_updates_whose_rows_are_lost_has_made_none(
    name: str, make_backend: MakeBackend, make_rows: MakeRows
) -> None:
    """behaviour: B12. It is discarded, and its groups come again: an update that had been made would count twice."""
    backend = make_backend(OPTIM)
    inner = in_portions(scored_rows(make_rows), 1)

    def supply(groups: int) -> Iterator[list[TrainRow]]:
        for portion, rows in enumerate(inner(groups)):
            if portion == GROUPS - 1:
                raise ConnectionError("the bus is gone")
            yield list(rows)

    with pytest.raises(ConnectionError):
        trainer(backend, AlgorithmConfig(name=name, mini_batches=2)).train(supply, 0, V0)
    assert backend.describe()["updates"] == 0


def test_epochs_pass_over_the_step_again(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    backend = make_backend(OPTIM)
    algorithm = AlgorithmConfig(name="dapo", epochs=3, mini_batches=2)
    outcome = trainer(backend, algorithm).train(in_portions(scored_rows(make_rows), 1), 0, V0)
    assert outcome is not None and outcome.updates == 6


def test_the_proximal_policy_is_the_one_before_the_first_update(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B27. In the first update every ratio is 1; in the second it is not, and the weight stays."""
    backend = make_backend(OPTIM)
    algorithm = AlgorithmConfig(name="dapo", behaviour="trainer", correction={"weight": "token"}, epochs=2)
    ratios, weights = [], []
    step = backend.step

    def record(*arguments: Any) -> Any:
        result = step(*arguments)
        ratios.append(result.stats["ratio_mean"])
        weights.append(result.stats["correction_weight_mean"])
        return result

    backend.step = record  # type: ignore[method-assign]
    trainer(backend, algorithm).train(in_portions(scored_rows(make_rows), 2), 0, V0)
    assert ratios[0] == pytest.approx(1, abs=1e-6) and abs(ratios[1] - 1) > 1e-4
    assert weights[0] == pytest.approx(weights[1], rel=1e-6) and abs(weights[0] - 1) > 1e-3


def test_mini_batches_hold_whole_groups_and_depend_on_the_key_alone(make_rows: MakeRows) -> None:
    """behaviour: B26"""
    rows = make_rows(12)
    parts = mini_batches(rows, 3, (1, 2, 0))
    assert [len(part) for part in parts] == [6, 3, 3]
    groups = [{group_of(row.row_id) for row in part} for part in parts]
    assert sum(len(group) for group in groups) == 4
    again = mini_batches(rows[::-1], 3, (1, 2, 0))
    assert [{group_of(row.row_id) for row in part} for part in again] == groups
    assert any(
        [{group_of(row.row_id) for row in part} for part in mini_batches(rows, 3, (1, 2, epoch))] != groups
        for epoch in range(1, 6)
    )


def test_the_end_of_the_data_ends_training(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B14"""
    for name in ("grpo", "reinforce_pp"):
        step = trainer(make_backend(), AlgorithmConfig(name=name))
        supply = in_portions(scored_rows(make_rows)[:3], 1)
        assert step.train(supply, 0, V0) is not None
        assert step.train(supply, 1, V0) is None


def test_one_failed_update_of_several_is_left_out_and_counted(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B45"""
    rows = scored_rows(make_rows)
    broken = [replace(row, rollout_logprobs=row.rollout_logprobs * np.float32(np.nan)) for row in rows[:3]]
    outcome = trainer(make_backend(), AlgorithmConfig(name="grpo", mini_batches=GROUPS)).train(
        in_portions([*broken, *rows[3:]], 1), 0, V0
    )
    assert outcome is not None and (outcome.updates, outcome.skipped) == (GROUPS - 1, 1)
    with pytest.raises(NonFiniteUpdate):
        trainer(make_backend(), AlgorithmConfig(name="grpo")).train(in_portions([*broken, *rows[3:]], 1), 0, V0)


def test_a_failed_update_of_the_critic_does_not_undo_the_count_of_the_policys(
    make_backend: MakeBackend, make_rows: MakeRows, make_critic: Callable[..., TorchCritic]
) -> None:
    """behaviour: B45. The step is not given up when the policy has moved."""
    backend, critic = make_backend(), make_critic()

    def broken(*_: Any) -> Any:
        raise NonFiniteUpdate("a value is not finite")

    critic.step = broken  # type: ignore[method-assign]
    step = trainer(backend, AlgorithmConfig(name="ppo"), critic, critic=CriticConfig())
    outcome = step.train(in_portions(scored_rows(make_rows), 2), 0, V0)
    assert outcome is not None and (outcome.updates, outcome.skipped) == (1, 1)
    warming = trainer(backend, AlgorithmConfig(name="ppo"), critic, critic=CriticConfig(warmup_steps=9))
    with pytest.raises(NonFiniteUpdate):
        warming.train(in_portions(scored_rows(make_rows), 2), 0, V0)


@pytest.fixture
def make_critic(model_folder: Path) -> Callable[..., TorchCritic]:
    def make(**fields: Any) -> TorchCritic:
        config = CriticConfig(optim=OptimConfig(lr=1e-2), **fields)
        return TorchCritic(config, ActorConfig(), model_folder, 100)

    return make


def test_a_new_critic_says_0_and_learns_the_returns(
    make_backend: MakeBackend, make_rows: MakeRows, make_critic: Callable[..., TorchCritic]
) -> None:
    critic = make_critic()
    config = CriticConfig(value_clip=None, warmup_steps=1000)
    step = trainer(make_backend(), AlgorithmConfig(name="ppo", gae={"lam": 1.0}), critic, critic=config)
    rows = [replace(row, reward=float(group_of(row.row_id) < "toy:0:2")) for row in scored_rows(make_rows)]
    errors = []
    for number in range(60):
        outcome = step.train(in_portions(rows, 2), number, V0)
        assert outcome is not None
        errors.append(outcome.result.stats["value_error"])
        if number == 0:
            assert outcome.result.stats["value_error"] == pytest.approx(
                np.mean(np.concatenate([np.full(int(row.loss_mask.sum()), row.reward**2) for row in rows])), rel=1e-5
            )
    assert errors[-1] < 0.05 * errors[0]


def test_in_its_warm_up_the_critic_learns_alone(
    make_backend: MakeBackend, make_rows: MakeRows, make_critic: Callable[..., TorchCritic]
) -> None:
    backend, critic = make_backend(), make_critic()
    config = CriticConfig(warmup_steps=1)
    step = trainer(backend, AlgorithmConfig(name="ppo"), critic, critic=config)
    before = parameters(backend)
    outcome = step.train(in_portions(scored_rows(make_rows), 2), 0, V0)
    assert outcome is not None and outcome.updates == 0 and outcome.result.stats["value_loss"] > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in parameters(backend).items())
    outcome = step.train(in_portions(scored_rows(make_rows), 2), 1, V0)
    assert outcome is not None and outcome.updates == 1
    assert not all(torch.equal(tensor, before[name]) for name, tensor in parameters(backend).items())


def test_a_restored_critic_says_what_it_said(
    tmp_path: Path, make_backend: MakeBackend, make_rows: MakeRows, make_critic: Callable[..., TorchCritic]
) -> None:
    critic = make_critic()
    step = trainer(make_backend(), AlgorithmConfig(name="ppo"), critic, critic=CriticConfig())
    step.train(in_portions(scored_rows(make_rows), 2), 0, V0)
    tokens = torch.arange(8).view(1, 8)
    wanted = torch.arange(8).view(1, 8) > 2
    said = critic.values(tokens, wanted)
    assert said[0, 3:].abs().min() > 0 and not said[0, :3].any()
    critic.save(tmp_path)
    other = make_critic()
    other.load(tmp_path)
    assert torch.equal(other.values(tokens, wanted), said)


def test_values_are_those_before_the_token(model_folder: Path, make_critic: Callable[..., TorchCritic]) -> None:
    """A change of token t changes the values after t and not that at t."""
    critic = make_critic()
    torch.nn.init.normal_(critic._model.head.weight)
    tokens = torch.arange(6).view(1, 6)
    other = tokens.clone()
    other[0, 3] = 9
    wanted = torch.arange(6).view(1, 6) > 0
    left, right = critic.values(tokens, wanted)[0], critic.values(other, wanted)[0]
    assert torch.equal(left[:4], right[:4]) and not torch.isclose(left[4:], right[4:]).any()


OWN = """
def by_rank(rows):
    ordered = sorted(rows, key=lambda row: row.reward)
    return {row.row_id: float(rank) for rank, row in enumerate(ordered)}

by_rank.needs = "step"

def imitate(batch, logprobs, entropy):
    from relax.training.base import LossOutput
    return LossOutput(-(logprobs * batch.loss_mask).sum(), float(batch.loss_mask.sum()), {"nll": (1.0, 1.0)})
"""


def test_own_advantage_and_own_loss_by_path(tmp_path: Path, make_backend: MakeBackend, make_rows: MakeRows) -> None:
    (tmp_path / "own.py").write_text(OWN)
    algorithm = AlgorithmConfig(advantage=f"{tmp_path}/own.py:by_rank", objective=f"{tmp_path}/own.py:imitate")
    step = trainer(make_backend(), algorithm)
    assert step.collects
    rows = step._prepared(scored_rows(make_rows), V0)
    assert sorted(float(np.max(row.advantage)) for row in rows) == list(range(12))
    outcome = step.train(in_portions(scored_rows(make_rows), 1), 0, V0)
    assert outcome is not None and outcome.result.stats == {"nll": 1.0}


def test_pairs_of_a_preference_stay_in_one_batch(make_backend: MakeBackend, make_rows: MakeRows) -> None:
    """behaviour: B25. Under a budget smaller than one pair too."""
    rows = [row for row in make_rows(3 * GROUPS) if not row.row_id.endswith("/2/0")]
    losses = []
    for budget in (4, 25, 10_000):
        outcome = trainer(make_backend(OPTIM), AlgorithmConfig(name="dpo"), micro_batch_tokens=budget).train(
            in_portions(rows, 1), 0, V0
        )
        assert outcome is not None
        losses.append(outcome.result.loss)
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)

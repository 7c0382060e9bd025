"""Engine and trainer named `simulated`: the protocols of the real ones, and the time of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.config.actor import ActorConfig
from relax.config.file import ConfigError, load_run_file
from relax.config.roles import EngineConfig
from relax.config.run import RunConfig
from relax.data.models import ensure_model
from relax.engines.backend import LocalEngine, build_engine
from relax.engines.base import EngineError
from relax.engines.client import SglangClient
from relax.engines.service import EngineService
from relax.engines.transports import LocalTransport
from relax.simulation.clock import Clock
from relax.training.base import TrainBatch
from relax.training.build import build_backend
from relax.types import FinishReason, PolicyVersion, SamplingParams
from relax.weights.store import WeightStore

SIM = Path(__file__).parents[2] / "deploy" / "sim_16xh800.yaml"
PROMPT = np.array([3, 4, 5], np.int32)


def run_config(**simulation: Any) -> RunConfig:
    profile = {
        "gpus": 4,
        "rollout_gpus": 2,
        "lengths": {"mean_tokens": 100, "sigma": 0.5, "prompt_tokens": 10},
        "trainer": {"token_gpu_s": 2e-3, "update_s": 1.0, "publish_s": 2.0},
        "time_scale": 1000.0,
        **simulation,
    }
    return RunConfig.model_validate({"max_prompt_tokens": 16, "max_response_tokens": 400, "simulation": profile})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_model(RunConfig().model, tmp_path_factory.mktemp("model"), 1)


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., tuple[LocalEngine, SglangClient]]]:
    """start(**simulation settings) -> a running engine and a client of it."""
    with ExitStack() as stack:

        def begin(**simulation: Any) -> tuple[LocalEngine, SglangClient]:
            engine = build_engine(EngineConfig(backend="simulated"), run_config(**simulation), model)
            engine.start()
            stack.callback(engine.close, 30)
            return engine, SglangClient(LocalTransport(EngineService(engine)))

        yield begin


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", keep=2)


def publish(store: WeightStore, backend: Any, version: int) -> str:
    staged = store.stage(PolicyVersion(version), version, list(backend.state_tensors()), 1 << 20)
    store.commit(staged)
    return str(store.root / f"v{version:08d}")


def trainer(run: RunConfig, model: Path) -> Any:
    return build_backend(ActorConfig(backend="simulated"), model, 10, 1, 1, run=run)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def batch(rows: int, tokens: int) -> TrainBatch:
    ones = torch.ones(rows, tokens)
    mask = ones.bool()
    mask[:, 0] = False
    return TrainBatch(ones.long(), ones.bool(), mask, torch.ones(rows), ones, ones, ones.int())


def test_a_clock_that_follows_another_runs_each_event_at_its_own_time() -> None:
    clock, seen = Clock(), list[tuple[str, float]]()

    def one() -> None:
        seen.append(("one", clock.now))
        clock.after(0.5, lambda: seen.append(("then", clock.now)))

    clock.after(1.0, one)
    late = clock.after(3.0, lambda: seen.append(("late", clock.now)))
    clock.advance(2.0)
    assert seen == [("one", 1.0), ("then", 1.5)] and clock.now == 2.0 and clock.next_at() == 3.0
    clock.cancel(late)
    assert clock.next_at() is None


async def test_samples_have_the_length_of_their_seed_and_end_as_real_ones_do(start: Any) -> None:
    """behaviour: B9 B23"""
    _, client = start()
    sampling = [SamplingParams(max_new_tokens=400, seed=seed) for seed in range(40)]
    first, again = [
        await asyncio.gather(*(client.generate(PROMPT, s, request_id=f"{n}-{s.seed}", deadline_s=60) for s in sampling))
        for n in range(2)
    ]
    lengths = [len(one.output_ids) for one in first]
    assert lengths == [len(one.output_ids) for one in again] and len(set(lengths)) > 20
    assert np.mean(lengths) == pytest.approx(100, rel=0.35)
    assert [one.output_ids.tolist() for one in first] == [one.output_ids.tolist() for one in again]
    for one in first:
        assert one.finish_reason is (FinishReason.LENGTH if len(one.output_ids) == 400 else FinishReason.STOP)
        assert len(one.logprobs) == len(one.versions) == len(one.output_ids)


async def test_versions_are_adopted_with_the_trainers_digest_and_drawn_by(
    start: Any, store: WeightStore, model: Path
) -> None:
    """The request is ended by hand once both versions have drawn: no timing decides. behaviour: B2 B4 B5"""
    long = {"mean_tokens": 390, "sigma": 0.01, "prompt_tokens": 10}
    engine, client = start(lengths=long, time_scale=0.2, trainer={"publish_s": 0.0})
    backend = trainer(run_config(), model)
    report = await client.update_weights_from_disk(publish(store, backend, 0), PolicyVersion(0), deadline_s=60)
    assert (report.version, report.digest) == (0, store.latest().digest)  # type: ignore[union-attr]
    backend.step([batch(2, 10)], lambda *_: None)
    folder = publish(store, backend, 1)
    running = asyncio.create_task(
        client.generate(PROMPT, SamplingParams(max_new_tokens=400, seed=1), request_id="r", deadline_s=60)
    )
    await until(lambda: engine.status().used_tokens >= 12)
    newer = await client.update_weights_from_disk(folder, PolicyVersion(1), deadline_s=60)
    assert newer.digest != report.digest
    before = engine.status().used_tokens
    await until(lambda: engine.status().used_tokens >= before + 2)
    await client.abort(None, deadline_s=60)
    drawn = await running
    assert set(drawn.versions.tolist()) == {0, 1} and (np.diff(drawn.versions) >= 0).all()
    with pytest.raises(EngineError):
        await client.update_weights_from_disk(folder, PolicyVersion(7), deadline_s=60)
    assert engine.version == 1 and engine.status().failed_weight_updates == 1


async def test_the_gap_to_the_trainer_is_0(start: Any, model: Path) -> None:
    """behaviour: B6"""
    _, client = start()
    tokens = torch.tensor([[3, 4, 5, 6]])
    theirs, _ = trainer(run_config(), model).logprobs(tokens, tokens > 0, torch.ones(1))
    [ours] = await client.score([tokens[0].int().numpy()], deadline_s=60)
    assert ours[1:].tolist() == theirs[0, 1:].tolist()


async def test_a_share_of_the_requests_fails_and_another_attempt_may_succeed(start: Any) -> None:
    """behaviour: B39"""
    engine, client = start(failure_share=0.5)

    async def attempts(seed: int) -> int:
        for attempt in range(1, 30):
            try:
                await client.generate(
                    PROMPT, SamplingParams(max_new_tokens=400, seed=seed), request_id=f"{seed}", deadline_s=60
                )
            except EngineError as error:
                assert "simulated failure" in str(error)
            else:
                return attempt
        raise AssertionError("30 failures in a row")

    found = await asyncio.gather(*(attempts(seed) for seed in range(60)))
    assert np.mean(found) == pytest.approx(2.0, abs=0.7)
    assert engine.status().failed_requests == sum(found) - 60


async def test_an_aborted_request_returns_what_it_has(start: Any) -> None:
    """behaviour: B5"""
    engine, client = start(time_scale=1.0)
    tasks = [
        asyncio.create_task(
            client.generate(PROMPT, SamplingParams(max_new_tokens=400, seed=n), request_id=f"r{n}", deadline_s=60)
        )
        for n in range(3)
    ]
    await until(lambda: engine.status().running == 3)
    await client.abort(None, deadline_s=60)
    for one in await asyncio.gather(*tasks):
        assert one.finish_reason is FinishReason.ABORT and len(one.output_ids) < 400
    assert engine.status().running == 0


def test_a_training_step_takes_what_its_tokens_take(model: Path) -> None:
    """2 batches of 10 x 200 sampled tokens at 2 ms of a GPU each, on 2 GPUs, and the update: 5 s, here in 1/20."""
    backend = trainer(run_config(time_scale=20.0), model)
    result = backend.step(iter([batch(10, 201), batch(10, 201)]), lambda *_: None)
    assert (result.n_tokens, result.n_rows) == (4000, 20)
    assert result.compute_s >= 5.0 / 20
    with pytest.raises(ValueError, match="at least one"):
        backend.step([], lambda *_: None)


def test_a_trainer_goes_on_from_its_state(model: Path, tmp_path: Path) -> None:
    """behaviour: B12"""
    first, second = trainer(run_config(), model), trainer(run_config(), model)
    for _ in range(3):
        first.step([batch(1, 4)], lambda *_: None)
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.describe()["updates"] == 3
    assert torch.equal(
        dict(first.state_tensors())["simulated.updates"], dict(second.state_tensors())["simulated.updates"]
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.backend=torch", "must both be 'simulated'"),
        ("rollout.instances=3", "run.simulation.rollout_gpus 8"),
        ("run.simulation=null", "need run.simulation"),
        ("rollout.engine.backend=simulatd", "unknown backend 'simulatd'"),
        ("actor.export=true", "goes without"),
    ],
)
def test_what_does_not_go_with_a_simulated_cluster_is_refused(override: str, words: str) -> None:
    """behaviour: B40"""
    with pytest.raises(ConfigError, match=words):
        load_run_file(SIM, [override])


async def test_a_fault_in_its_thread_ends_the_requests_and_is_told(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an engine that is ill without a reason, and not a caller that waits for ever."""
    engine, client = start(time_scale=0.01)
    running = asyncio.create_task(
        client.generate(PROMPT, SamplingParams(max_new_tokens=400, seed=1), request_id="r", deadline_s=60)
    )
    await until(lambda: engine.status().running == 1)

    def broken() -> float:
        raise ZeroDivisionError("no such time")

    monkeypatch.setattr(engine._clock, "next_at", broken)
    with engine._wake:
        engine._wake.notify()
    with pytest.raises(EngineError, match="ZeroDivisionError: no such time"):
        await running
    assert not engine.healthy() and engine.failure == "ZeroDivisionError: no such time"
    with pytest.raises(EngineError, match="no such time"):
        await client.generate(PROMPT, SamplingParams(max_new_tokens=4, seed=1), request_id="s", deadline_s=60)

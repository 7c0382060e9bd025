"""Compute a recorded step again: rewards, advantages, loss and gradient, from the dump alone and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from relax.algorithms import needs_ref, needs_reward, needs_values, teacher_columns
from relax.config.algorithm import AlgorithmConfig
from relax.config.file import ConfigError, apply_override
from relax.config.roles import RewardConfig
from relax.config.sections import ActorArgs
from relax.dump.compare import WEIGHTS_AFTER, WEIGHTS_BEFORE, Compared, compare_steps
from relax.dump.files import CRITIC, MODEL, STATE
from relax.dump.record import BY_NAME, DumpError, RowDump, StepDump
from relax.dump.recorder import Recorder, RecordingBackend, RecordingCritic, result_numbers, with_computed
from relax.rewards.base import RewardRequest, RewardResult
from relax.rewards.failures import settle
from relax.rewards.pool import RewardPool
from relax.training.base import NonFiniteUpdate
from relax.training.batching import TrainRow
from relax.training.build import build_backend, build_critic
from relax.training.own_trainer import build_step
from relax.types import FinishReason, PolicyVersion, Prompt, SamplingParams, group_of
from relax.weights.digest import tensors_digest

REPLAYED = ("reward", "accuracy", *(name for name, spec in BY_NAME.items() if spec.computed))
"""Fields that a replay makes; the others are its input."""


def replay(
    dump: StepDump, folder: Path, overrides: Sequence[str] = (), *, base: Path, recorded_rewards: bool = False
) -> StepDump:
    """The step as it comes out now. `base`: folder that paths of own functions count from.

    `overrides` are `section.key=value`; `actor.algorithm.name` starts from that preset. `recorded_rewards` takes the
    rewards as they are, for functions that cannot run here. Raises `DumpError` for what was not recorded and is
    needed, `ConfigError` for settings that do not go together, and the errors of own functions and model folders.
    """
    config = replay_config(dump.config, overrides)
    args = _validated(ActorArgs, {"run": config["run"], "actor": config["actor"]}, "run, actor")
    algorithm = args.actor.algorithm
    _require(dump, folder, args)
    rows = dict(dump.rows)
    if needs_reward(algorithm) and not recorded_rewards and "reward" in config:
        reward = _validated(RewardConfig, config["reward"], "reward")
        rows = _rewarded(rows, asyncio.run(_score(rows, reward, args.run.max_response_tokens, base)), reward)
    return replace(_trained(dump, rows, folder, args, base), config=config)


def compare_replay(dump: StepDump, again: StepDump, tolerance: float) -> list[Compared]:
    """What a replay computes, against what was recorded."""
    inputs = {name for name in BY_NAME if name not in REPLAYED} | {"rows"}
    # Loaded weights are the recorded ones bit by bit; those after the update have the rounding of the machine.
    compared = compare_steps(dump, again, tolerance)
    return [found for found in compared if found.field not in inputs and found.field != WEIGHTS_AFTER]


def replay_config(recorded: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The recorded sections with overrides. Raises `ConfigError` for one that names no recorded section."""
    if "run" not in recorded or "actor" not in recorded:
        raise DumpError("the dump holds no settings of run and actor: it cannot be replayed")
    sections = {name: section for name, section in recorded.items() if name != "run"}
    if any(override.startswith("actor.algorithm.name=") for override in overrides):
        sections["actor"] = {**sections["actor"], "algorithm": {}}  # recorded values are those of the old preset
    document = {
        "applications": [
            {"name": name, "args": {"run": recorded["run"], name: dict(section)}} for name, section in sections.items()
        ]
    }
    for override in overrides:
        apply_override(document, override)
    applications: list[Any] = document["applications"]
    return {"run": applications[0]["args"]["run"]} | {app["name"]: app["args"][app["name"]] for app in applications}


def _validated(model: Any, section: Any, what: str) -> Any:
    try:
        return model.model_validate(section)
    except ValidationError as error:
        raise ConfigError(
            f"{'.'.join(str(part) for part in item['loc']) or what}: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors(include_url=False)
        ) from error


def _require(dump: StepDump, folder: Path, args: ActorArgs) -> None:
    """Everything that the settings read must be in the dump."""
    algorithm = args.actor.algorithm
    for part in (MODEL, STATE):
        if not (folder / part).is_dir():
            raise DumpError(f"{folder} has no weights: record them (actor.dump.at with rollout and weights)")
    needed = ["tokens", "loss_mask", "rollout_logprobs", "versions", "sampling", *_columns(algorithm)]
    for name in needed:
        if not dump.has(name):
            raise DumpError(f"step {dump.step} has no '{name}', which these settings read: the run did not record it")
    if needs_values(algorithm) and (args.actor.critic is None or not (folder / CRITIC).is_dir()):
        raise DumpError("advantage 'gae' reads a critic's values, and the run had no critic")


def _columns(algorithm: AlgorithmConfig) -> list[str]:
    names = ["reward"] if needs_reward(algorithm) else []
    return [*names, *(["ref_logprobs"] if needs_ref(algorithm) else []), *teacher_columns(algorithm)]


# ---------------------------------------------------------------------- rewards


async def _score(
    rows: Mapping[str, RowDump], config: RewardConfig, max_response_tokens: int, base: Path
) -> dict[str, RewardResult]:
    async with RewardPool(config, max_response_tokens=max_response_tokens, base=base) as pool:
        results = await asyncio.gather(*(pool.score(_request(row)) for row in rows.values()))
    return dict(zip(rows, results, strict=True))


def _request(row: RowDump) -> RewardRequest:
    missing = [
        name for name in ("prompt", "response_text", "finish_reason", "metadata", "loss_mask") if name not in row.values
    ]
    if missing:
        raise DumpError(f"row {row.row_id}: {', '.join(missing)} not recorded, which rewards read")
    return RewardRequest.of(
        Prompt.from_json(row.values["prompt"]),
        row.values["response_text"],
        FinishReason(row.values["finish_reason"]),
        int(row.array("loss_mask").sum()),
        row.values["metadata"],
    )


def _rewarded(
    rows: Mapping[str, RowDump], results: Mapping[str, RewardResult], config: RewardConfig
) -> dict[str, RowDump]:
    out = {}
    for row_id, row in rows.items():
        result = results[row_id]
        settled = settle(result, config.on_failure, config.failure_reward)
        if settled.excluded is not None:
            raise DumpError(
                f"row {row_id}: its reward fails here ({result.state.value}: {result.error}), and did not in the run; "
                "--recorded-rewards goes on with the recorded ones"
            )
        scored = {
            "reward": float(np.float32(settled.reward)),  # as the bus carries it
            "accuracy": float(np.float32(settled.accuracy)),
            "reward_parts": dict(result.parts),
            "reward_state": result.state.value,
        }
        out[row_id] = replace(row, values={**row.values, **scored})
    return out


# ---------------------------------------------------------------------- the step


def _trained(dump: StepDump, rows: Mapping[str, RowDump], folder: Path, args: ActorArgs, base: Path) -> StepDump:
    run, actor = args.run, args.actor
    updates = run.steps * actor.algorithm.updates_per_step
    trust = run.model.trust_remote_code
    backend = RecordingBackend(
        build_backend(actor, folder / MODEL, updates, run.seed, run.threads, trust_remote_code=trust, base=base)
    )
    recorder = Recorder()
    try:
        backend.load(folder / STATE)
        inner = build_critic(actor, folder / MODEL, updates, trust_remote_code=trust, base=base)
        critic = None if inner is None else RecordingCritic(inner)
        if critic is not None:
            critic.load(folder / CRITIC)
            critic.recorder = recorder
        backend.recorder = recorder
        before = tensors_digest(backend.state_tensors())
        trainer = build_step(run, actor, backend, critic, base)
        try:
            outcome = trainer.train(
                Portions(rows.values(), actor.algorithm), dump.step - 1, PolicyVersion(dump.version)
            )
        except NonFiniteUpdate as error:
            raise DumpError(f"step {dump.step}: the update does not succeed here: {error}") from error
        assert outcome is not None, "a dump has rows"
        after = tensors_digest(backend.state_tensors())
    finally:
        backend.close()
    return replace(
        dump,
        rows=with_computed(rows, recorder),
        updates=tuple(recorder.updates),
        result=result_numbers(outcome.result),
        digests={WEIGHTS_BEFORE: before, WEIGHTS_AFTER: after},
    )


class Portions:
    """The supply of a step: rows as the actor's leases brought them, so that micro-batches are the same."""

    def __init__(self, rows: Iterable[RowDump], algorithm: AlgorithmConfig) -> None:
        groups: dict[tuple[int, str], list[TrainRow]] = {}
        for row in rows:
            groups.setdefault((row.portion, group_of(row.row_id)), []).append(train_row(row, algorithm))
        self._left = [
            (portion, members) for (portion, _), members in sorted(groups.items(), key=lambda item: item[0][0])
        ]

    def __call__(self, n_groups: int) -> Iterator[list[TrainRow]]:
        while n_groups > 0 and self._left:
            portion = self._left[0][0]
            taken: list[TrainRow] = []
            while n_groups > 0 and self._left and self._left[0][0] == portion:
                taken += self._left.pop(0)[1]
                n_groups -= 1
            yield taken


def train_row(row: RowDump, algorithm: AlgorithmConfig) -> TrainRow:
    """What the step reads of a recorded row. Raises `DumpError` for a field that is not there."""
    columns = [name for name in _columns(algorithm) if name != "reward"]
    return TrainRow(
        row_id=row.row_id,
        tokens=row.array("tokens"),
        loss_mask=row.array("loss_mask"),
        rollout_logprobs=row.array("rollout_logprobs"),
        versions=row.array("versions"),
        temperature=SamplingParams.from_json(row.values["sampling"]).temperature,
        reward=float(row.values["reward"]) if needs_reward(algorithm) else 0.0,
        **{name: row.array(name) for name in columns},
    )

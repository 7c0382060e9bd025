"""Makes dumps as the Actor does: its own dumper over a real trainer and a tiny model, with leases made by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from bus.records import GroupInfo, Lease, Row
from relax.algorithms import needs_ref, needs_reward
from relax.config.roles import RewardConfig
from relax.config.sections import ActorArgs
from relax.data.models import ensure_model
from relax.data.tokenizer import Tokenizer
from relax.dump.files import read_dump, step_folder, write_dump
from relax.dump.record import RowDump, StepDump
from relax.dump.recorder import RecordingBackend, RecordingCritic
from relax.rewards.base import RewardRequest
from relax.rewards.compose import build_spec, score
from relax.rewards.pool import spec_json
from relax.telemetry.run_folder import RunFolder
from relax.training.batching import TrainRow
from relax.training.build import build_backend, build_critic
from relax.training.own_trainer import build_step
from relax.types import FinishReason, PolicyVersion, Prompt, SamplingParams
from services.actor.batch import train_rows
from services.actor.dumping import StepDumper
from services.runtime import RoleReporter

GROUPS, MEMBERS = 4, 3
PARTS = [{"name": "exact", "weight": 0.5}, {"name": "overlap", "weight": 0.5}]


@dataclass
class Reporter:
    """Counts, as a role's reporter does outside of Serve."""

    counts: Counter[str] = field(default_factory=Counter)
    facts: dict[str, Any] = field(default_factory=dict)

    def count(self, name: str, amount: float = 1.0) -> None:
        self.counts[name] += int(amount)


@dataclass
class Made:
    """A run folder with dumps, and what was counted while they were made."""

    run_dir: Path
    reporter: Reporter
    dumper: StepDumper

    def folder(self, step: int = 1) -> Path:
        return step_folder(self.run_dir / "dumps", step)


def make_dumps(
    run_dir: Path,
    algorithm: dict[str, Any],
    *,
    steps: int = 1,
    parts: list[dict[str, Any]] = PARTS,
    base: Path | None = None,
    at: tuple[str, ...] | None = None,
    lr: float = 3e-3,
    **actor: Any,
) -> Made:
    """Train `steps` steps on random answers to random questions, recording each."""
    torch.set_num_threads(1)
    dump = {"steps": "1-", **({} if at is None else {"at": at})}
    members = {"sft": 1, "dpo": 2}.get(algorithm["name"], MEMBERS)
    args = ActorArgs.model_validate(
        {
            "run": {"groups_per_step": GROUPS, "group_size": members, "steps": 10, "max_response_tokens": 4,
                    "responses": "recorded" if algorithm["name"] in ("sft", "dpo") else "generated"},
            "actor": {"algorithm": algorithm, "optim": {"lr": lr}, "dump": dump, **actor},
        }
    )  # fmt: skip
    reward = RewardConfig(parts=parts, overlong={"buffer_tokens": 2})  # type: ignore[arg-type]
    sections = {
        "run": args.run,
        "actor": args.actor,
        **({"reward": reward} if needs_reward(args.actor.algorithm) else {}),
    }
    RunFolder(run_dir).write_config({name: model.model_dump(mode="json") for name, model in sections.items()})
    model = ensure_model(args.run.model, run_dir / "model", args.run.seed)
    backend = RecordingBackend(build_backend(args.actor, model, 10, args.run.seed, 1))
    inner = build_critic(args.actor, model, 10)
    critic = None if inner is None else RecordingCritic(inner)
    reporter, tokenizer = Reporter(), Tokenizer.load(model)
    dumper = StepDumper(args, run_dir, backend, critic, tokenizer, cast(RoleReporter, reporter))
    trainer = build_step(args.run, args.actor, backend, critic, base)
    for step in range(1, steps + 1):
        leases = _leases(args, reward, tokenizer, step, base or Path.cwd())
        dumper.begin(step)

        def supply(n: int, leases: list[Lease] = leases) -> Iterator[list[TrainRow]]:
            while n > 0 and leases:
                lease = leases.pop(0)
                n -= len(lease.groups)
                dumper.add(lease)
                yield train_rows(lease, args.actor.algorithm)

        outcome = trainer.train(supply, step - 1, PolicyVersion(step - 1))
        assert outcome is not None
        dumper.finish(outcome, PolicyVersion(step - 1))
    return Made(run_dir, reporter, dumper)


def _leases(args: ActorArgs, reward: RewardConfig, tokenizer: Tokenizer, step: int, base: Path) -> list[Lease]:
    """Two leases of two groups each: the digits of the answers are drawn, the third member's is cut off."""
    draw = np.random.default_rng(step)
    spec = build_spec(spec_json(reward, args.run.max_response_tokens), base)
    leases = []
    for part in range(2):
        rows, groups = [], []
        for index in (2 * part, 2 * part + 1):
            digits = "".join(map(str, draw.integers(0, 10, 3)))
            prompt = Prompt("toy", 0, 100 * step + index, text=f"{digits}>", label=digits[::-1])
            for k in range(args.run.group_size):
                rows.append(_row(args, spec, tokenizer, prompt, k, draw))
            groups.append(GroupInfo(prompt.group_id, 0, 1, args.run.group_size, 0, "train", {}, (), {}, 0, 0))
        leases.append(Lease(f"lease-{part}", "actor", 30.0, tuple(rows), tuple(groups)))
    return leases


def _row(args: ActorArgs, spec: Any, tokenizer: Tokenizer, prompt: Prompt, k: int, draw: np.random.Generator) -> Row:
    answer = "".join(map(str, draw.integers(0, 10, 2))) + str(prompt.label)[2]
    asked = tokenizer.render(prompt)
    ended = k != 2
    said = [*tokenizer.encode(answer), *([tokenizer.eos_ids[0]] if ended else [])]
    tokens = np.array([*asked, *said], np.int32)
    mask = np.arange(len(tokens)) >= len(asked)
    algorithm = args.actor.algorithm
    fields: dict[str, Any] = {
        "prompt": prompt.to_json(),
        "tokens": tokens,
        "loss_mask": mask,
        "rollout_logprobs": np.where(mask, draw.uniform(-3, -1, len(tokens)), 0).astype(np.float32),
        "versions": np.where(mask, 0, -1).astype(np.int32),
        "sampling": SamplingParams().to_json(),
        "finish_reason": "stop" if ended else "length",
        "metadata": {},
    }
    if needs_reward(algorithm):
        request = RewardRequest.of(prompt, answer, FinishReason(fields["finish_reason"]), len(said), {})
        result = score(spec, request)
        fields |= {
            "reward": np.array(result.reward, np.float32),
            "accuracy": np.array(result.accuracy, np.float32),
            "reward_parts": dict(result.parts),
            "reward_state": result.state.value,
        }
    if needs_ref(algorithm):
        fields["ref_logprobs"] = np.where(mask, draw.uniform(-3, -1, len(tokens)), 0).astype(np.float32)
    return Row(f"{prompt.group_id}/{k}/0", prompt.group_id, k, 0, fields, {})


def changed(dump: StepDump, row_id: str, name: str, value: Any) -> StepDump:
    """The dump with another value in one row."""
    row = dump.rows[row_id]
    return replace(dump, rows={**dump.rows, row_id: RowDump(row_id, row.portion, {**row.values, name: value})})


def change_file(folder: Path, row_id: str, name: str, value: Any) -> None:
    """The same in a dump's files, whose digests are those of the new values."""
    write_dump(changed(read_dump(folder), row_id, name, value), folder)

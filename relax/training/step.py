"""One training step over any backend: from scored rows to optimizer updates.

    streamed    rows of a few groups ─▶ advantages ─▶ micro-batches ─▶ forward/backward, while others are drawn
    collected   all rows of the step ─▶ proximal log-probs, values ─▶ advantages, whitening, masks
                                     ─▶ epochs x mini-batches of updates, of policy and critic

What an algorithm reads decides which (`relax.algorithms.needs_step`). Both give the same sums (B25).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from relax.algorithms import (
    Advantage,
    ScoredRow,
    build_loss,
    compute_advantages,
    needs_proximal,
    needs_reward,
    needs_step,
    own_advantage,
    whitened,
)
from relax.algorithms.ratios import m2_masks
from relax.algorithms.value import ValueLoss
from relax.config.actor import ActorConfig
from relax.config.algorithm import AlgorithmConfig
from relax.config.run import RunConfig
from relax.training.base import Critic, NonFiniteUpdate, StepResult, TrainBatch, TrainingBackend
from relax.training.batching import TrainRow, make_batches
from relax.types import FloatArray, PolicyVersion, group_of

Supply = Callable[[int], Iterator[Sequence[TrainRow]]]
"""n -> the rows of n groups, in portions of whole groups as they become ready; ends early when the data has."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`updates` of the policy were made; `skipped` ones, of policy or critic, had a number that was not finite."""

    result: StepResult
    updates: int
    skipped: int


class StepTrainer:
    """Owns no state but the models: called by one thread, once per step.

    `critic` is there exactly when the algorithm reads values. `base`: folder that paths of own functions count
    from. Raises `PluginError` for an own function that is not there.
    """

    def __init__(
        self,
        run: RunConfig,
        actor: ActorConfig,
        backend: TrainingBackend,
        critic: Critic | None = None,
        base: Path | None = None,
    ) -> None:
        self._run, self._actor, self._algorithm = run, actor, actor.algorithm
        self._backend, self._critic = backend, critic
        self._loss = build_loss(actor.algorithm, run.max_response_tokens, base)
        self._own = own_advantage(actor.algorithm, base)
        self._whole_groups = actor.algorithm.objective == "dpo" or getattr(self._loss, "whole_groups", False)
        self.collects = needs_step(actor.algorithm, self._own)

    def train(self, supply: Supply, step: int, version: PolicyVersion) -> StepOutcome | None:
        """Train committed step number `step` (0-based) of policy `version`; None when the data has ended.

        Raises `NonFiniteUpdate` when no update succeeded, the critic's included: nothing has changed then.
        An update that fails after another succeeded is left out and counted.
        """
        updates = _Updates()
        if self.collects:
            self._collected(supply, step, version, updates)
        else:
            self._streamed(supply, version, updates)
        return updates.outcome()

    # ---- streamed

    def _streamed(self, supply: Supply, version: PolicyVersion, updates: _Updates) -> None:
        batches = self._stream(supply(self._run.groups_per_step), version)
        first = next(batches, None)
        if first is not None:
            updates.add(self._backend.step, chain([first], batches), self._loss)

    def _stream(self, portions: Iterable[Sequence[TrainRow]], version: PolicyVersion) -> Iterator[TrainBatch]:
        for rows in portions:
            if rows:
                advantages = self._advantages(rows)
                yield from self._batches([_with(row, advantages[row.row_id]) for row in rows], version)

    def _batches(self, rows: Sequence[TrainRow], version: PolicyVersion) -> Iterator[TrainBatch]:
        return make_batches(
            rows,
            self._actor.micro_batch_tokens,
            share_prompts=self._actor.share_prompts,
            whole_groups=self._whole_groups,
            version=version,
        )

    def _advantages(self, rows: Sequence[TrainRow]) -> dict[str, Advantage]:
        if not needs_reward(self._algorithm):
            return {row.row_id: Advantage(row.loss_mask.astype(np.float32)) for row in rows}
        scored = [
            ScoredRow(
                row.row_id,
                row.reward,
                row.loss_mask,
                row.rollout_logprobs,
                row.ref_logprobs,
                row.values,
                row.teacher_logprobs,
            )
            for row in rows
        ]
        return compute_advantages(self._algorithm, scored, self._own)

    # ---- collected

    def _collected(self, supply: Supply, step: int, version: PolicyVersion, updates: _Updates) -> None:
        rows = [row for portion in supply(self._run.groups_per_step) for row in portion]
        if not rows:
            return
        begin = time.perf_counter()
        rows = self._prepared(rows, version)
        updates.compute_s += time.perf_counter() - begin
        critic = self._actor.critic
        policy_learns = critic is None or step >= critic.warmup_steps
        for epoch in range(self._algorithm.epochs):
            for part in mini_batches(rows, self._algorithm.mini_batches, (self._run.seed, step, epoch)):
                if critic is not None and self._critic is not None:
                    updates.add_critic(self._critic.step, self._batches(part, version), ValueLoss(critic.value_clip))
                if policy_learns:
                    updates.add(self._backend.step, self._batches(part, version), self._loss)

    def _prepared(self, rows: Sequence[TrainRow], version: PolicyVersion) -> list[TrainRow]:
        """With everything that is taken before the first update: it speaks of the policy before the step."""
        config = self._algorithm
        if needs_proximal(config):
            found = self._of_each(rows, version, self._proximal)
            rows = [replace(row, proximal_logprobs=found[row.row_id]) for row in rows]
        if self._critic is not None:
            values = self._of_each(rows, version, self._values)
            rows = [replace(row, values=values[row.row_id]) for row in rows]
        advantages = self._advantages(rows)
        if config.whiten and needs_reward(config):
            advantages = whitened(advantages, {row.row_id: row.loss_mask for row in rows})
        rows = [_with(row, advantages[row.row_id]) for row in rows]
        return _m2_weighted(config, rows)

    def _of_each(
        self, rows: Sequence[TrainRow], version: PolicyVersion, score: Callable[[TrainBatch], Tensor]
    ) -> dict[str, FloatArray]:
        """Row id -> float32 [T]."""
        lengths = {row.row_id: len(row) for row in rows}
        out: dict[str, FloatArray] = {}
        for batch in self._batches(rows, version):
            scores = score(batch).cpu().numpy()
            out.update({i: line[: lengths[i]].copy() for i, line in zip(batch.row_ids, scores, strict=True)})
        return out

    def _proximal(self, batch: TrainBatch) -> Tensor:
        logprobs, _ = self._backend.logprobs(batch.tokens, batch.attention_mask, batch.temperature)
        return torch.where(batch.loss_mask, logprobs.cpu(), 0.0)

    def _values(self, batch: TrainBatch) -> Tensor:
        assert self._critic is not None
        return self._critic.values(batch.tokens, batch.loss_mask)


def mini_batches(rows: Sequence[TrainRow], parts: int, key: tuple[int, int, int]) -> list[list[TrainRow]]:
    """The rows in `parts` of nearly as many whole groups; which groups go together is a function of `key`."""
    groups = sorted({group_of(row.row_id) for row in rows})
    if parts > 1:
        random.Random(repr(key)).shuffle(groups)
    part_of = {group: index % parts for index, group in enumerate(groups)}
    out: list[list[TrainRow]] = [[] for _ in range(min(parts, len(groups)))]
    for row in rows:
        out[part_of[group_of(row.row_id)]].append(row)
    return out


def _with(row: TrainRow, advantage: Advantage) -> TrainRow:
    return replace(row, advantage=advantage.advantages, returns=advantage.returns)


def _m2_weighted(config: AlgorithmConfig, rows: list[TrainRow]) -> list[TrainRow]:
    if config.m2_threshold is None:
        return rows
    log_ratios = {
        row.row_id: np.where(row.loss_mask, row.proximal_logprobs - row.rollout_logprobs, 0.0).astype(np.float32)
        for row in rows
        if row.proximal_logprobs is not None
    }
    weights = m2_masks(
        log_ratios,
        {row.row_id: np.broadcast_to(np.float32(row.advantage), len(row)) for row in rows},
        {row.row_id: row.loss_mask for row in rows},
        config.m2_threshold,
    )
    return [replace(row, token_weights=weights[row.row_id]) for row in rows]


class _Updates:
    """The updates of one step, as one result."""

    def __init__(self) -> None:
        self.compute_s = 0.0
        self._results: list[StepResult] = []
        self._critic: list[StepResult] = []
        self._errors: list[NonFiniteUpdate] = []

    def add(self, step: Callable[..., StepResult], *arguments: object) -> None:
        self._try(self._results, step, arguments)

    def add_critic(self, step: Callable[..., StepResult], *arguments: object) -> None:
        self._try(self._critic, step, arguments)

    def _try(self, results: list[StepResult], step: Callable[..., StepResult], arguments: tuple[object, ...]) -> None:
        try:
            results.append(step(*arguments))
        except NonFiniteUpdate as error:
            self._errors.append(error)

    def outcome(self) -> StepOutcome | None:
        if self._errors and not self._results and not self._critic:
            raise self._errors[0]
        if not self._results and not self._critic:
            return None
        compute_s = self.compute_s + sum(result.compute_s for result in (*self._results, *self._critic))
        first = (self._results or self._critic)[0]
        stats = _means([dict(result.stats) for result in self._results])
        if self._critic:
            stats |= _means([dict(result.stats) for result in self._critic])
            stats["value_loss"] = sum(result.loss for result in self._critic) / len(self._critic)
            stats["critic_grad_norm"] = max(result.grad_norm for result in self._critic)
        result = StepResult(
            loss=sum(result.loss for result in self._results) / max(1, len(self._results)),
            grad_norm=max((result.grad_norm for result in self._results), default=0.0),
            lr=self._results[-1].lr if self._results else 0.0,
            n_tokens=sum(result.n_tokens for result in self._results or [first]),
            n_rows=sum(result.n_rows for result in self._results or [first]),
            stats=stats,
            compute_s=compute_s,
        )
        return StepOutcome(result, len(self._results), len(self._errors))


def _means(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of several updates' statistics; names ending in `_max` take the largest."""
    names = dict.fromkeys(name for part in parts for name in part)
    out = {}
    for name in names:
        values = [part[name] for part in parts if name in part]
        out[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return out

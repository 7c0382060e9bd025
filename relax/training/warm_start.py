"""Short supervised training before reinforcement learning: over any backend, through `step`."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from relax.algorithms.supervised import SupervisedLoss
from relax.config.actor import ActorConfig, OptimConfig
from relax.config.algorithm import AlgorithmConfig
from relax.training.base import StepResult, TrainingBackend
from relax.training.batching import TrainRow, make_batches
from relax.training.build import build_backend

Example = tuple[Sequence[int], Sequence[int]]
"""(prompt tokens, response tokens with the end token): the response is learnt."""

_LOSS = SupervisedLoss(AlgorithmConfig(name="sft"))


def warm_start(
    backend: TrainingBackend, examples: Sequence[Example], *, steps: int, batch: int, micro_batch_tokens: int, seed: int
) -> list[StepResult]:
    """`steps` updates of `batch` examples each, in an order that is a function of `seed`.

    Every example is seen once before any is seen again. Raises `ValueError` without examples.
    """
    order = _endless_order(len(examples), seed)
    results = []
    for _ in range(steps):
        rows = [_row(slot, examples[next(order)]) for slot in range(batch)]
        results.append(backend.step(make_batches(rows, micro_batch_tokens), _LOSS))
    return results


def warm_started_model(
    config: ActorConfig,
    model_folder: Path,
    target: Path,
    examples: Sequence[Example],
    seed: int,
    threads: int,
    *,
    trust_remote_code: bool = False,
) -> Path:
    """The model of `model_folder` after `config.warm_start`, as a Hugging Face folder at `target`.

    Trains with an optimizer of its own, so that no moment of it reaches the run's. Made once: an existing
    `target` is returned as it is, and an interrupted attempt leaves none.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        warm = config.warm_start
        own = config.model_copy(update={"optim": OptimConfig(lr=warm.lr)})
        backend = build_backend(own, model_folder, warm.steps, seed, threads, trust_remote_code=trust_remote_code)
        try:
            warm_start(
                backend,
                examples,
                steps=warm.steps,
                batch=warm.batch,
                micro_batch_tokens=config.micro_batch_tokens,
                seed=seed,
            )
            backend.export(staging)
        finally:
            backend.close()
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _endless_order(count: int, seed: int) -> Iterator[int]:
    if count == 0:
        raise ValueError("warm start has no labelled examples")

    def order() -> Iterator[int]:
        draw = random.Random(seed)
        while True:
            yield from draw.sample(range(count), count)

    return order()


def _row(slot: int, example: Example) -> TrainRow:
    prompt, response = example
    tokens = np.array([*prompt, *response], dtype=np.int32)
    loss_mask = np.arange(len(tokens)) >= len(prompt)
    return TrainRow(
        row_id=f"warm:0:{slot}/0/0",
        tokens=tokens,
        loss_mask=loss_mask,
        rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
        versions=np.where(loss_mask, 0, -1).astype(np.int32),
        temperature=1.0,
    )

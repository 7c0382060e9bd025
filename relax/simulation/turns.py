"""Response lengths, and generation and training in turns on the same GPUs: what a profile is fitted on."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from relax.config.run import RunConfig
from relax.config.simulation import SimulationConfig
from relax.simulation.clock import Clock
from relax.simulation.engine import Sample, SimEngine

COLOCATE = "colocate"
"""Mode, and key of its published figure."""


@dataclass(slots=True)
class Figures:
    """What a simulated run came to. Times in simulated seconds, over the steps after the warm ones."""

    step_s: list[float] = field(default_factory=list)
    trainer_wait_s: list[float] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)
    tokens: list[int] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def mean_step_s(self, warm: int) -> float:
        return float(np.mean(self.step_s[warm:]))

    def wait_share(self, warm: int) -> float:
        return float(np.sum(self.trainer_wait_s[warm:]) / np.sum(self.step_s[warm:]))


class Lengths:
    """Response lengths of samples: a function of (seed, group, member) alone, so that every mode draws the same."""

    def __init__(self, run: RunConfig, config: SimulationConfig) -> None:
        self._seed, self._limit = run.seed, run.max_response_tokens
        self._sigma = config.lengths.sigma
        self._mu = math.log(config.lengths.mean_tokens) - self._sigma**2 / 2

    def of_group(self, index: int, size: int) -> list[int]:
        return self.drawn([self._seed, index], size)

    def drawn(self, seed: int | list[int], size: int) -> list[int]:
        values = np.random.default_rng(seed).lognormal(self._mu, self._sigma, size)
        return [max(1, min(self._limit, round(value))) for value in values]


def fitted(run: RunConfig, config: SimulationConfig, colocated_s: float) -> SimulationConfig:
    """The profile whose colocated step takes `colocated_s`: the trainer's cost of a token is what is left of it.

    Raises `ValueError` when generating alone takes as long.
    """
    free = config.model_copy(update={"trainer": config.trainer.model_copy(update={"token_gpu_s": 1e-12})})
    figures = colocated(run, free)
    left_s = colocated_s - figures.mean_step_s(config.warm_steps)
    if left_s <= 0:
        raise ValueError(f"a colocated step of {colocated_s:g} s is shorter than its generation in this profile")
    tokens = float(np.mean(figures.tokens[config.warm_steps :]))
    trainer = config.trainer.model_copy(update={"token_gpu_s": left_s * config.gpus / tokens})
    return config.model_copy(update={"trainer": trainer})


def colocated(run: RunConfig, config: SimulationConfig) -> Figures:
    """All GPUs generate a step's groups, then all train on them: nothing overlaps."""
    clock, lengths, figures = Clock(), Lengths(run, config), Figures()
    done: list[Sample] = []
    engines = [SimEngine(clock, config.engine, done.append) for _ in range(config.gpus)]
    size = run.groups_per_step * run.group_size
    for step in range(run.steps):
        begin = clock.now
        waiting = [
            Sample(f"s:0:{g}", k, length, config.lengths.prompt_tokens)
            for g in range(step * run.groups_per_step, (step + 1) * run.groups_per_step)
            for k, length in enumerate(lengths.of_group(g, run.group_size))
        ]
        done.clear()
        for number, engine in enumerate(engines):
            share = waiting[number :: len(engines)]
            if len(share) > config.engine.slots:
                raise ValueError(f"colocated: {len(share)} samples an engine, simulation.engine.slots is smaller")
            engine.start(share, config.lengths.prompt_tokens * len({s.group_id for s in share}))
        clock.run(lambda: len(done) == size)
        generated = clock.now
        tokens = sum(sample.length for sample in done)
        seconds = tokens * config.trainer.token_gpu_s / config.gpus + config.trainer.update_s + config.switch_s
        clock.after(seconds, lambda: None)
        clock.run(lambda end=generated + seconds: clock.now >= end)  # type: ignore[misc]
        for engine in engines:
            engine.version = step + 1
        figures.step_s.append(clock.now - begin)
        figures.trainer_wait_s.append(generated - begin)
        figures.tokens.append(tokens)
        figures.lags[0] += tokens
    return figures


def profile_of(run: RunConfig) -> SimulationConfig:
    """What the run's simulation is about: fitted on the published colocated figure where there is one."""
    profile = run.simulation or SimulationConfig()
    if COLOCATE not in profile.published_s:
        return profile
    return fitted(run, profile.model_copy(update={"mode": COLOCATE}), profile.published_s[COLOCATE])

"""The verdict on a complete group: trained, filtered, or dropped.

The dynamic-sampling filter reads the raw accuracy, never the shaped reward (B29).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from relax.config.roles import FilterConfig
from relax.types import RelaxError

ACCURACY_LOW, ACCURACY_HIGH = "accuracy_low", "accuracy_high"
"""Reasons of the band filter."""


class JudgeError(RelaxError, ValueError):
    """The members are not a complete group."""


class NoSignal(RelaxError):
    """Every group of a long streak was filtered: training cannot go on (B28)."""


class Outcome(enum.StrEnum):
    ACCEPTED = "accepted"
    FILTERED = "filtered"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Member:
    """One sample of a group, terminal: with a row, or a tombstone with its reason."""

    k: int
    tombstone: str | None = None
    reward: float | None = None
    accuracy: float | None = None
    """Raw, in [0, 1]. None where the reward was given by policy (`on_failure: floor`)."""
    reward_state: str | None = None


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """`reason` is a short counted name, `detail` a sentence. `survivors` are the k that have rows."""

    outcome: Outcome
    reason: str = ""
    detail: str = ""
    survivors: tuple[int, ...] = ()
    mean_accuracy: float | None = None


OwnFilter = Callable[[Sequence[Member]], bool]
"""An own function: the members that have rows, in order of k -> whether the group is trained."""


def judge_group(
    members: Sequence[Member],
    group_size: int,
    min_group_size: int | None,
    filter_config: FilterConfig,
    own_filter: OwnFilter | None = None,
) -> GroupVerdict:
    """Members are keyed by k, in any order (B26). Default of `min_group_size` is the whole group. `own_filter` is
    the function that `filter_config.kind` names by path.

    Raises `JudgeError` unless each k in [0, group_size) is there once.
    """
    keys = sorted(member.k for member in members)
    if keys != list(range(group_size)):
        raise JudgeError(f"a complete group of {group_size} needs each k once, got {keys}")
    alive = sorted((member for member in members if member.tombstone is None), key=lambda member: member.k)
    survivors = tuple(member.k for member in alive)
    needed = group_size if min_group_size is None else min(min_group_size, group_size)
    if len(alive) < needed:
        lost = sorted({member.tombstone for member in members if member.tombstone is not None})
        detail = f"{len(alive)} of {group_size} samples survived, {needed} are needed; lost by: {', '.join(lost)}"
        return GroupVerdict(Outcome.DROPPED, "too_few_members", detail, survivors)
    if filter_config.kind == "none":
        return GroupVerdict(Outcome.ACCEPTED, survivors=survivors, mean_accuracy=_mean_accuracy(alive))
    if own_filter is not None:
        keep = own_filter(alive)
        if not isinstance(keep, bool):
            raise JudgeError(f"the filter {filter_config.kind} returned {keep!r}; True or False is needed")
        outcome, reason = (Outcome.ACCEPTED, "") if keep else (Outcome.FILTERED, "own_filter")
        return GroupVerdict(outcome, reason, "", survivors, _mean_accuracy(alive))
    return _filter_by_accuracy(alive, survivors, filter_config)


def _filter_by_accuracy(alive: list[Member], survivors: tuple[int, ...], band: FilterConfig) -> GroupVerdict:
    """DAPO, arXiv 2503.14476, eq. 11: 0 < |correct| < G, with general bounds."""
    mean = _mean_accuracy(alive)
    if mean is None:
        return GroupVerdict(Outcome.DROPPED, "no_accuracy", "no sample has a raw accuracy to filter by", survivors)
    if mean <= band.low:
        return GroupVerdict(Outcome.FILTERED, ACCURACY_LOW, f"mean accuracy {mean:g} <= {band.low:g}", survivors, mean)
    if mean >= band.high:
        detail = f"mean accuracy {mean:g} >= {band.high:g}"
        return GroupVerdict(Outcome.FILTERED, ACCURACY_HIGH, detail, survivors, mean)
    return GroupVerdict(Outcome.ACCEPTED, survivors=survivors, mean_accuracy=mean)


def _mean_accuracy(members: Iterable[Member]) -> float | None:
    values = [member.accuracy for member in members if member.accuracy is not None and math.isfinite(member.accuracy)]
    return math.fsum(values) / len(values) if values else None


class FilterStreak:
    """Counts filtered groups in a row, so that a task without signal ends clearly (B28)."""

    def __init__(self, task: str, config: FilterConfig):
        self.task = task
        self.config = config
        self.low = 0
        self.high = 0

    @property
    def length(self) -> int:
        return self.low + self.high

    def observe(self, verdict: GroupVerdict) -> None:
        """Raises `NoSignal` at the configured length. Dropped groups neither end nor lengthen a streak."""
        if verdict.outcome is Outcome.ACCEPTED:
            self.low = self.high = 0
        elif verdict.outcome is Outcome.FILTERED:
            if verdict.reason == ACCURACY_HIGH:
                self.high += 1
            else:
                self.low += 1
        if self.length >= self.config.max_filtered_prompts:
            raise NoSignal(self._text())

    def _text(self) -> str:
        if ":" in self.config.kind:
            return (
                f"task '{self.task}': the last {self.length} prompts in a row were filtered by {self.config.kind}, so "
                "there is nothing to train on. The limit is rollout.filter.max_filtered_prompts."
            )
        return (
            f"task '{self.task}': the last {self.length} prompts in a row were filtered by {self.config.kind} "
            f"({self.config.low:g} < mean accuracy < {self.config.high:g}): {self.low} were too low, {self.high} too "
            f"high, so there is nothing to train on. {self._remedy()} "
            f"The limit is rollout.filter.max_filtered_prompts."
        )

    def _remedy(self) -> str:
        if self.low >= self.high:
            return "Take an easier task, warm the policy up (actor.warm_start), or lower rollout.filter.low."
        return "Take a harder task, or raise rollout.filter.high."


def constant_reward_warning(step: int, rewards: Sequence[float]) -> str | None:
    """A warning when all rewards of a step are equal (B21), else None. One sample says nothing."""
    if len(rewards) < 2 or min(rewards) != max(rewards):
        return None
    return (
        f"step {step}: all {len(rewards)} samples have the same reward {rewards[0]:g}, so advantages are zero and "
        f"nothing is learned; check the reward function and the task's difficulty"
    )

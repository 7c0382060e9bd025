"""A fixed held-out set, answered through the same engines, bus and rewards as training."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Sequence

from bus.client import BusClient
from bus.errors import BusUnavailable
from bus.records import Event, EventKind, GroupAdmission, MemberReport
from relax.telemetry.pass_at_k import pass_at_k
from relax.types import PolicyVersion, Prompt, Purpose, RelaxError
from services.controller.api import EvalReport

PART_TAG = "part_"
"""Prefix of the tags that carry the parts of a reward."""
RIGHT = 1.0
"""Accuracy from which an answer counts as right for pass@k."""


class EvalIncomplete(RelaxError):
    """Some answers did not come in time."""


class Evaluation:
    """One pass over the held-out prompts, `samples` answers each. Answers are kept in the order of the prompts, so that
    two passes pair."""

    def __init__(self, when: str, prompts: Sequence[Prompt], epoch: int, first_seq: int, samples: int = 1):
        self.when = when
        self._prompts = [dataclasses.replace(prompt, epoch=epoch) for prompt in prompts]
        self._first_seq = first_seq
        self._samples = samples
        self._answers: dict[str, tuple[MemberReport, ...]] = {}
        self._all = asyncio.Event()
        self._lost = False

    def on_event(self, event: Event) -> None:
        if event.kind is EventKind.COMPLETE:
            self._answers[event.group_id] = tuple(event.members)
            if len(self._answers) == len(self._prompts):
                self._all.set()

    def on_loss(self) -> None:
        """The bus that held the answers is gone."""
        self._lost = True
        self._all.set()

    async def run(self, bus: BusClient, version: PolicyVersion, deadline_s: float) -> EvalReport:
        """A failed answer counts as accuracy 0, as in training it would.

        Raises `EvalIncomplete` past the deadline, `BusUnavailable` when the bus was lost.
        """
        await bus.admit(
            [
                GroupAdmission(
                    group_id=prompt.group_id,
                    seq=self._first_seq + index,
                    group_size=self._samples,
                    min_version=version,
                    prompt=prompt.to_json(),
                    purpose=Purpose.EVAL,
                )
                for index, prompt in enumerate(self._prompts)
            ],
            deadline_s=deadline_s,
        )
        try:
            await asyncio.wait_for(self._all.wait(), deadline_s)
        except TimeoutError as error:
            raise EvalIncomplete(
                f"evaluation '{self.when}': {len(self._answers)} of {len(self._prompts)} prompts answered "
                f"within {deadline_s:g} s (rollout.eval.deadline_s)"
            ) from error
        if self._lost:
            raise BusUnavailable(f"the bus was lost during evaluation '{self.when}'")
        groups = [self._answers[prompt.group_id] for prompt in self._prompts]
        await bus.collect_eval([prompt.group_id for prompt in self._prompts])
        accuracies = [[report.accuracy or 0.0 for report in reports] for reports in groups]
        return EvalReport(
            when=self.when,
            version=int(version),
            accuracy=tuple(statistics.fmean(values) for values in accuracies),
            parts=_part_means([report for reports in groups for report in reports]),
            pass_at=pass_at_k([sum(value >= RIGHT for value in values) for values in accuracies], self._samples),
        )


def _part_means(reports: Sequence[MemberReport]) -> dict[str, float]:
    names = sorted({tag for report in reports for tag in report.tags if tag.startswith(PART_TAG)})
    return {
        name.removeprefix(PART_TAG): statistics.fmean(_number(report.tags.get(name)) for report in reports)
        for name in names
    }


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0

"""Prompts that an earlier epoch found too easy are not drawn again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from relax.config.roles import FilterConfig
from relax.control.judge import ACCURACY_HIGH, NoSignal
from relax.types import GroupId


class RetiredPrompts:
    """What the filter said of a prompt in one epoch decides whether the next draws it (`filter.retire_easy`).

    It follows from the verdicts alone, which are in the ledger: a run that goes on retires the same prompts.
    """

    def __init__(self, task: str, config: FilterConfig, verdicts: Iterable[tuple[GroupId, str]] = ()):
        """`verdicts`: group and reason of what was filtered so far."""
        self.task, self.config = task, config
        self._easy: set[tuple[str, str]] = set()
        self._in_a_row = 0
        for group_id, reason in verdicts:
            self.note(group_id, reason)

    def note(self, group_id: GroupId, reason: str) -> None:
        """A group was filtered."""
        if self.config.retire_easy and reason == ACCURACY_HIGH:
            self._easy.add(_prompt_of(group_id))

    def passes_over(self, group_id: GroupId) -> bool:
        """Whether this prompt is left out. Raises `NoSignal` when `max_filtered_prompts` in a row are."""
        if not self._easy or _prompt_of(group_id) not in self._easy:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        if self._in_a_row >= self.config.max_filtered_prompts:
            raise NoSignal(
                f"task '{self.task}': the next {self._in_a_row} prompts in a row were too easy in an earlier epoch "
                f"(rollout.filter.retire_easy, {len(self._easy)} prompts): the data is learnt. "
                "Add harder prompts, or end the run after fewer epochs (rollout.data.epochs)."
            )
        return True


def _prompt_of(group_id: GroupId) -> tuple[str, str]:
    """Source and index: the group id without its epoch."""
    source, _, index = group_id.rsplit(":", 2)
    return source, index

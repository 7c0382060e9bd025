"""Prompts that were too easy in an earlier epoch."""

from __future__ import annotations

import pytest

from relax.config.roles import FilterConfig
from relax.control.judge import ACCURACY_HIGH, ACCURACY_LOW, NoSignal
from relax.control.retired import RetiredPrompts
from relax.types import make_group_id

BAND = FilterConfig(kind="accuracy_band", retire_easy=True, max_filtered_prompts=3)


def test_a_prompt_that_was_too_easy_is_passed_over_in_later_epochs_and_no_other() -> None:
    retired = RetiredPrompts("sums", BAND)
    retired.note(make_group_id("a:b", 0, 7), ACCURACY_HIGH)
    retired.note(make_group_id("a:b", 0, 8), ACCURACY_LOW)  # may yet be learnt
    assert retired.passes_over(make_group_id("a:b", 1, 7))
    assert retired.passes_over(make_group_id("a:b", 5, 7))
    assert not retired.passes_over(make_group_id("a:b", 1, 8))
    assert not retired.passes_over(make_group_id("a", 1, 7))


def test_it_follows_from_the_verdicts_of_the_ledger() -> None:
    again = RetiredPrompts("sums", BAND, [(make_group_id("s", 0, 1), ACCURACY_HIGH), (make_group_id("s", 0, 2), "x")])
    assert again.passes_over(make_group_id("s", 1, 1)) and not again.passes_over(make_group_id("s", 1, 2))


def test_nothing_is_retired_unless_asked() -> None:
    off = RetiredPrompts("sums", FilterConfig(kind="accuracy_band"), [(make_group_id("s", 0, 1), ACCURACY_HIGH)])
    assert not off.passes_over(make_group_id("s", 1, 1))


def test_data_that_is_learnt_ends_clearly() -> None:
    """behaviour: B28"""
    retired = RetiredPrompts("sums", BAND, [(make_group_id("s", 0, i), ACCURACY_HIGH) for i in range(3)])
    assert retired.passes_over(make_group_id("s", 1, 0)) and retired.passes_over(make_group_id("s", 1, 1))
    with pytest.raises(NoSignal, match=r"task 'sums': the next 3 prompts in a row were too easy"):
        retired.passes_over(make_group_id("s", 1, 2))
    assert not retired.passes_over(make_group_id("s", 1, 9))

"""The end of a run, role by role."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax.control.stopping import Hearing, all_stopped, others_may_stop

TRAINER = Hearing(trains=True, state="running")
OTHER = Hearing(trains=False, state="running")


def test_the_others_serve_the_trainer_until_it_has_stopped() -> None:
    """It has heard, and still saves: its ledger record needs the manager, its checkpoint needs DCS."""
    saving = replace(TRAINER, stopping=True)
    assert not others_may_stop([saving, OTHER])
    assert not all_stopped([saving, replace(OTHER, stopping=True)])
    stopped = replace(TRAINER, state="stopped", stopping=True)
    assert others_may_stop([stopped, OTHER])
    assert not all_stopped([stopped, OTHER]), "the others have not heard"
    assert all_stopped([stopped, replace(OTHER, stopping=True)])


@pytest.mark.parametrize("state", ["done", "failed", "stopped"])
def test_nobody_waits_for_who_has_ended(state: str) -> None:
    assert all_stopped([replace(TRAINER, state=state), replace(OTHER, state=state)])


def test_nobody_waits_for_who_is_silent_or_for_a_trainer_that_comes_up() -> None:
    assert all_stopped([replace(TRAINER, silent=True), replace(OTHER, silent=True)])
    assert all_stopped([replace(TRAINER, state="starting")])
    assert not all_stopped([replace(OTHER, state="starting")]), "it may already use what is taken down"
    assert all_stopped([])

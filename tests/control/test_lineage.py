"""What a trainer publishes that goes on from an older state."""

from __future__ import annotations

import pytest

from relax.control.lineage import Published, next_version, version_to_publish
from relax.types import PolicyVersion

NEWEST = PolicyVersion(20)
AT_20 = Published(NEWEST, 20)


@pytest.mark.parametrize(
    ("why", "step", "published", "newest", "needed", "publishes"),
    [
        ("the run begins", 0, None, None, 0, 0),
        ("it died after the publication", 20, AT_20, AT_20, 20, None),
        ("it died between snapshot and publication", 21, AT_20, AT_20, 20, 21),
        ("steps are trained again from their rows", 10, AT_20, AT_20, 20, None),
        ("their rows are gone", 10, AT_20, AT_20, 21, 21),
        ("no engine has weights any more", 10, None, AT_20, 20, 21),
        ("a run that was stopped after its last step is resumed", 20, None, AT_20, 20, 20),
        ("both", 10, None, AT_20, 21, 21),
        (
            "one that the ledger did not hear of",
            10,
            Published(PolicyVersion(22), 21),
            22,
            21,
            None,
        ),
    ],
)
def test_a_trainer_that_comes_up_publishes_what_the_engines_lack(
    why: str, step: int, published: Published | None, newest: Published | None, needed: int, publishes: int | None
) -> None:
    """behaviour: B10"""
    assert version_to_publish(step, published, newest, PolicyVersion(needed)) == publishes, why


def test_nothing_is_published_until_the_newest_published_step_is_passed() -> None:
    """behaviour: B10"""
    assert [next_version(step, AT_20) for step in (11, 20, 21)] == [None, None, 21]
    older = Published(PolicyVersion(21), 10)  # after rows were lost: an older policy under a new number
    assert [next_version(step, older) for step in (10, 11)] == [None, 22]


def test_the_policy_of_a_step_has_the_version_that_it_would_have_published() -> None:
    assert [AT_20.at(step) for step in (20, 18, 21)] == [20, 18, 21]
    assert Published(PolicyVersion(21), 10).at(11) == 22

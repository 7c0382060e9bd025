"""Which checkpoints stay."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from relax.checkpoint.retention import Saved, kept
from relax.config.roles import RetentionConfig


def saves(*rewards: float) -> list[Saved]:
    """One in every ten steps, with this reward."""
    return [Saved(serial, 10 * serial, {"reward_mean": reward}) for serial, reward in enumerate(rewards, 1)]


def test_the_newest_stay_by_the_order_of_saving_and_not_by_step() -> None:
    after_a_rollback = [Saved(1, 10), Saved(2, 20), Saved(3, 30), Saved(4, 20)]
    assert kept(after_a_rollback, RetentionConfig(newest=2)) == {3, 4}
    assert kept(list(reversed(after_a_rollback)), RetentionConfig(newest=1)) == {4}


def test_the_best_stay_beside_the_newest() -> None:
    saved = saves(0.1, 0.9, 0.5, 0.9, 0.2)
    assert kept(saved, RetentionConfig(newest=1, best=1)) == {4, 5}, "of two equal ones the later"
    assert kept(saved, RetentionConfig(newest=1, best=3)) == {2, 3, 4, 5}
    assert kept(saved, RetentionConfig(newest=1, best=1, best_is="lowest")) == {1, 5}


def test_what_was_not_measured_is_not_best() -> None:
    saved = [Saved(1, 10), Saved(2, 20, {"reward_mean": math.nan}), *saves(0, 0, 0.3)[2:], Saved(4, 40)]
    assert kept(saved, RetentionConfig(newest=1, best=2)) == {3, 4}
    assert kept(saved, RetentionConfig(newest=1, best=2, best_by="accuracy_mean")) == {4}


def test_one_in_every_so_many_steps_stays_for_good() -> None:
    assert kept(saves(0, 0, 0, 0, 0, 0, 0), RetentionConfig(newest=1, every=30)) == {3, 6, 7}


def test_of_two_saves_of_a_step_the_later_one_counts() -> None:
    twice = [Saved(1, 30, {"reward_mean": 0.9}), Saved(2, 40), Saved(3, 30, {"reward_mean": 0.1}), Saved(4, 50)]
    assert kept(twice, RetentionConfig(newest=1, every=30)) == {3, 4}
    assert kept(twice, RetentionConfig(newest=1, best=1)) == {3, 4}


@given(
    rewards=st.lists(st.floats(allow_nan=True), min_size=1, max_size=12),
    policy=st.builds(
        RetentionConfig,
        newest=st.integers(1, 4),
        best=st.integers(0, 4),
        best_is=st.sampled_from(["highest", "lowest"]),
        every=st.integers(0, 40),
    ),
)
def test_the_last_one_always_stays_and_what_went_is_never_missed_later(
    rewards: list[float], policy: RetentionConfig
) -> None:
    """Collecting after each save leaves the same as collecting once, for ever more saves."""
    all_of_them, so_far = saves(*rewards), list[Saved]()
    for saved in all_of_them:
        so_far.append(saved)
        stay = kept(so_far, policy)
        assert saved.serial in stay
        so_far = [one for one in so_far if one.serial in stay]
    assert {one.serial for one in so_far} == kept(all_of_them, policy)

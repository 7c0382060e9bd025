"""The index: puts, budgets, accounts, events, freeing."""

from __future__ import annotations

import pytest
from bus_driver import EVAL, Driver, digest, version

from bus.errors import GroupTooLarge, PutLost, SchemaError
from bus.records import Empty, EventKind, Grant, Rollback, RowHeader, TrainedStep, VerdictKind


def test_the_first_write_of_a_field_wins() -> None:
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    assert d.put("rollout", [d.sample("g0", 0)], grant.lease_id).stored == 4
    assert d.put("rollout", [d.sample("g0", 0)], grant.lease_id).repeated == 4
    other = d.put("rollout", [d.sample("g0", 0, value="else")], grant.lease_id)
    assert (other.stored, other.refused) == (0, (("g0/0/0", "digest"),) * 4)
    assert d.index.stats(0.0).counters["refused_digest"] == 4


def test_of_two_concurrent_writers_the_first_to_commit_wins() -> None:
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    plans = [d.plan("rollout", [d.sample("g0", 0, value=v)], grant.lease_id) for v in ("a", "b")]
    assert plans[0].rows[0].slot == plans[1].rows[0].slot
    assert plans[0].column != plans[1].column
    second = d.index.commit_put(d.callers["rollout"], plans[1].put_id, 0.0)
    first = d.index.commit_put(d.callers["rollout"], plans[0].put_id, 0.0)
    assert (second.stored, first.stored, len(first.refused)) == (4, 0, 4)


def test_a_refused_reward_does_not_change_the_tags() -> None:
    """Refused when planned, and refused when another commit came first."""
    d = Driver()
    d.admit("g0", 0, size=1)
    d.generate()
    grant = d.granted("reward")
    late = d.plan("reward", [d.reward_of("g0/0/0", 0.5)], grant.lease_id)
    d.put("reward", [d.reward_of("g0/0/0", 1.0)], grant.lease_id)
    assert d.put("reward", [d.reward_of("g0/0/0", 0.0)], grant.lease_id).refused
    assert d.index.commit_put(d.callers["reward"], late.put_id, 0.0).refused
    assert d.events()[0].members[0].reward == 1.0


def test_a_tag_of_a_later_put_does_not_replace_an_earlier_one() -> None:
    d = Driver()
    d.admit("g0", 0, size=1)
    d.generate()
    d.score()
    other = RowHeader("g0/0/0", "g0", (("values", digest("v"), 4),), {"reward": 0.0, "extra": 7})
    assert d.put("actor", [other]).stored == 1
    d.judge("g0")
    assert d.granted("actor").rows[0].tags["reward"] == 1.0
    assert d.index.state.rows["g0/0/0"].tags["extra"] == 7


def test_a_planned_put_is_invisible_until_committed_and_can_be_committed_once() -> None:
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    plan = d.plan("rollout", [d.sample("g0", 0)], grant.lease_id)
    assert isinstance(d.lease("reward"), Empty)
    d.index.commit_put(d.callers["rollout"], plan.put_id, 0.0)
    assert isinstance(d.lease("reward"), Grant)
    with pytest.raises(PutLost):
        d.index.commit_put(d.callers["rollout"], plan.put_id, 0.0)


def test_an_abandoned_plan_gives_its_room_back() -> None:
    d = Driver(plan_ttl_s=5.0)
    before = d.index.stats(0.0)
    d.plan("manager", [d.admission("g0", 0)])
    assert d.index.stats(0.0).reserved_rows == 1
    d.now = 5.0
    d.index.tick(d.now)
    d.collect()
    after = d.index.stats(5.0)
    assert (after.rows, after.reserved_rows, after.reserved_bytes) == (before.rows, 0, 0)
    assert d.index.state.prompt_rows == 0


@pytest.mark.parametrize("row_id", ["g0/2/0", "g0/x/0", "g0/0", "g1/0/0"])
def test_a_row_id_must_name_a_member_of_its_group(row_id: str) -> None:
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    bad = d.sample("g0", 0)._replace(row_id=row_id)
    with pytest.raises(SchemaError):
        d.put("rollout", [bad], grant.lease_id)


def test_a_late_row_of_an_ended_group_is_refused_and_counted() -> None:
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    d.index.drop(d.callers["manager"], "g0", "deadline", 0.0)
    late = d.plan("rollout", [d.sample("g0", 0)], grant.lease_id)
    assert (late.rows, late.refused) == ((), (("g0/0/0", "terminal"),))
    assert d.index.stats(0.0).counters["refused_terminal"] == 1
    assert d.ack("rollout", grant.lease_id).void == ("g0",)
    assert d.index.account().produced == 0


def test_admission_is_idempotent_and_a_higher_attempt_asks_only_for_what_is_missing() -> None:
    d = Driver()
    assert d.admit("g0", 0).stored == 1
    assert d.admit("g0", 0).repeated == 1
    first = d.granted("rollout")
    d.put("rollout", [d.sample("g0", 0)], first.lease_id)
    d.index.tombstone(d.callers["rollout"], "g0", 1, "abort", first.lease_id, 0.0)
    d.admit("g0", 0, attempt=1)
    group = d.granted("rollout").groups[0]
    assert (group.attempt, group.done, group.missing, group.tombstones) == (1, (0,), (1,), {})


def test_an_ended_group_is_not_admitted_again() -> None:
    """Nothing is trained twice: the caller may not yet have read the event."""
    d = Driver()
    d.ready_group("g0", 0)
    d.ack("actor", d.granted("actor").lease_id, step=1)
    d.index.gc(d.callers["actor"], 1, 0.0)
    assert d.admit("g0", 0, attempt=1).refused == (("g0", "trained"),)


def test_a_put_whose_group_ends_before_its_commit_is_refused() -> None:
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    plan = d.plan("rollout", [d.sample("g0", 0)], grant.lease_id)
    d.index.drop(d.callers["manager"], "g0", "deadline", 0.0)
    assert d.index.commit_put(d.callers["rollout"], plan.put_id, 0.0).refused == (("g0/0/0", "terminal"),)
    assert (d.index.account().produced, d.index.account().queued) == (0, 0)


# -- budget


def test_a_group_is_leased_only_when_its_worst_case_fits() -> None:
    """behaviour: B35"""
    d = Driver(max_rows=7)
    for i in range(3):
        d.admit(f"g{i}", i, size=2)
    grants = [d.lease("rollout") for _ in range(3)]
    assert [type(g) for g in grants] == [Grant, Grant, Empty]
    assert grants[2] == Empty("budget")
    d.index.drop(d.callers["manager"], "g0", "deadline", 0.0)
    assert isinstance(d.lease("rollout"), Grant), "the reservation returns at once"


def test_prompts_leave_room_for_one_group() -> None:
    """behaviour: B35. Else prompts alone could fill the bus and nothing would ever move."""
    d = Driver(max_rows=7)
    admitted = 0
    while d.plan("manager", [d.admission(f"g{admitted}", admitted, size=4)]) is not None:
        admitted += 1
    assert admitted == 3


def test_a_group_larger_than_the_budget_is_refused_at_admission() -> None:
    d = Driver(max_rows=16)
    with pytest.raises(GroupTooLarge):
        d.admit("g0", 0, size=16)
    with pytest.raises(GroupTooLarge):
        Driver(max_bytes=1000).admit("g0", 0, size=5)


def test_a_reservation_shrinks_to_the_worst_case_of_the_actual_length() -> None:
    d = Driver()
    d.admit("g0", 0, size=2)
    grant = d.granted("rollout")
    assert d.index.stats(0.0).reserved_bytes == 2 * (10 * 10 + 100)
    d.put("rollout", [d.sample("g0", 0, tokens=3)], grant.lease_id)
    stats = d.index.stats(0.0)
    assert (stats.reserved_rows, stats.reserved_bytes) == (1, 200)
    assert stats.bytes == 20 + 3 * 10 + 100
    d.index.tombstone(d.callers["rollout"], "g0", 1, "abort", grant.lease_id, 0.0)
    assert d.index.stats(0.0).reserved_bytes == 0


def test_trained_rows_are_retained_under_a_budget_of_their_own_until_a_checkpoint_covers_them() -> None:
    d = Driver(retained_max_bytes=50)
    d.ready_group("g0", 0)
    result = d.ack("actor", d.granted("actor").lease_id, step=3)
    assert result.retained_over_budget
    stats = d.index.stats(0.0)
    assert (stats.rows, stats.bytes, stats.retained_rows) == (0, 0, 3)
    assert d.index.gc(d.callers["actor"], 2, 0.0) == 0
    assert d.index.gc(d.callers["actor"], 3, 0.0) == 3
    d.collect()
    assert d.index.stats(0.0).retained_bytes == 0


def test_rows_of_a_dropped_group_are_freed_once_nobody_reads_them() -> None:
    d = Driver()
    d.admit("g0", 0)
    d.generate()
    reading = d.granted("reward", max_items=2)
    d.index.drop(d.callers["manager"], "g0", "deadline", 0.0)
    assert d.collect() == 0
    assert d.ack("reward", reading.lease_id).acked == 0
    assert d.collect() == 3
    assert d.index.stats(0.0).rows == 0


def test_partitions_rotate_and_empty_ones_are_removed() -> None:
    d = Driver(partition_rows=2)
    for i in range(3):
        d.ready_group(f"g{i}", i)
    d.ack("actor", d.granted("actor", max_items=3).lease_id, step=1)
    d.index.gc(d.callers["actor"], 1, 0.0)
    d.collect()
    assert set(d.index.take_empty_partitions()) == {"prompts@0", "samples@0", "samples@1"}


# -- accounts


def test_every_produced_sample_is_trained_dropped_or_queued() -> None:
    """behaviour: B16"""
    d = Driver()
    d.ready_group("trained", 0)
    d.ack("actor", d.granted("actor").lease_id, step=1)
    d.admit("filtered", 1)
    d.generate()
    d.score()
    d.judge("filtered", VerdictKind.FILTERED, "constant_reward")
    d.admit("half", 2, size=3)
    grant = d.granted("rollout")
    d.put("rollout", [d.sample("half", 0)], grant.lease_id)
    d.admit("waiting", 3)
    account = d.index.account()
    assert account.produced == 5
    assert account.trained == 2
    assert account.dropped == {"constant_reward": 2}
    assert (account.queued, account.running, account.waiting) == (1, 2, 2)
    assert account.balanced


def test_a_tombstone_counts_as_dropped_only_where_a_row_was_produced() -> None:
    """behaviour: B16"""
    d = Driver()
    d.admit("g0", 0, size=2)
    grant = d.granted("rollout")
    d.put("rollout", [d.sample("g0", 0)], grant.lease_id)
    for k, reason in ((0, "reward_failed"), (1, "abort")):
        d.index.tombstone(d.callers["rollout"], "g0", k, reason, grant.lease_id, 0.0)
    account = d.index.account()
    assert (account.produced, account.dropped, account.balanced) == (1, {"reward_failed": 1}, True)


def test_sums_survive_the_groups_they_came_from() -> None:
    """behaviour: B16"""
    d = Driver()
    d.ready_group("g0", 0)
    d.ack("actor", d.granted("actor").lease_id, step=1)
    d.index.gc(d.callers["actor"], 1, 0.0)
    d.events(after=10)
    assert d.index.state.groups == {}
    assert (d.index.account().trained, d.index.account().balanced) == (2, True)


def test_eval_rows_are_counted_apart_and_freed_when_collected() -> None:
    d = Driver()
    d.admit("e0", 0, purpose=EVAL)
    d.generate()
    d.score()
    assert d.events()[0].purpose.value == EVAL
    stats = d.index.stats(0.0)
    assert (stats.account.produced, stats.eval_produced, stats.eval_held) == (0, 2, 2)
    assert d.index.collect_eval(d.callers["manager"], ("e0",), 0.0) == 3
    d.collect()
    assert d.index.stats(0.0).rows == 0


def test_a_rollback_queues_the_retained_groups_again_in_their_order() -> None:
    d = Driver()
    for i in range(3):
        d.ready_group(f"g{i}", i)
        d.granted("actor")
        d.index.commit_step(d.callers["actor"], TrainedStep(i + 1, i + 1, {f"g{i}": 2}), 0.0)
    d.ready_group("young", 3, min_version=-1)
    before = d.events()
    assert d.index.rollback(d.callers["manager"], Rollback(1, 1, ("g1",)), 0.0)
    account = d.index.account()
    assert (account.produced, account.trained, account.queued, account.balanced) == (8, 2, 6, True)
    unheard = [e for e in before if e.kind is EventKind.TRAINED and e.step != 1]
    assert d.events() == [e for e in before if e not in unheard] and len(unheard) == 2
    assert d.index.rollback(d.callers["manager"], Rollback(1, 1, ("g1",)), 0.0), "a repeated call changes nothing"
    assert [g.group_id for g in d.granted("actor", max_items=9).groups] == ["g1", "g2", "young"]
    assert (d.index.state.step, d.index.state.version) == (1, 3)
    groups = {"g1": 2}
    assert d.index.commit_step(d.callers["actor"], TrainedStep(2, 3, groups), 0.0).acked == 1
    assert d.events()[-1].version == 3 and d.index.account().trained == 4


@pytest.mark.parametrize("lost", ["collected", "elsewhere", "unknown"])
def test_a_rollback_to_rows_that_are_gone_changes_nothing(lost: str) -> None:
    """behaviour: B12. Only an empty bus can go on from the ledger then; half a step would be another step."""
    d = Driver()
    d.ready_group("g0", 0)
    d.ready_group("g1", 1)
    d.granted("actor", max_items=9)
    d.index.commit_step(d.callers["actor"], TrainedStep(1, 1, {"g0": 2}), 0.0)
    if lost == "collected":
        d.index.gc(d.callers["actor"], 1, 0.0)
    if lost == "elsewhere":
        assert d.index.seed(d.callers["manager"], {}, 0, 0, 0.0)
        assert d.index.recommit(d.callers["actor"], (TrainedStep(2, 2, {"g9": 2}),), 0.0) == 1
    d.index.commit_step(d.callers["actor"], TrainedStep(3, 3, {"g1": 2}), 0.0)
    account, events = d.index.account(), d.events()
    known = {"collected": (), "elsewhere": ("g0", "g1"), "unknown": ("g0", "g1", "g7")}[lost]
    assert not d.index.rollback(d.callers["manager"], Rollback(1, 0, known), 0.0)
    assert (d.index.account(), d.events(), d.index.state.step) == (account, events, 3)
    assert isinstance(d.lease("actor", max_items=9), Empty)


def test_what_is_taken_back_keeps_its_room_until_it_ends_again() -> None:
    """behaviour: B35. Rows of trained groups have a budget of their own: a rollback takes none from the producers."""
    d = Driver()
    for i in range(2):
        d.ready_group(f"g{i}", i)
    d.granted("actor", max_items=9)
    d.index.commit_step(d.callers["actor"], TrainedStep(1, 1, {"g0": 2, "g1": 2}), 0.0)
    before = d.index.stats(0.0)
    assert (before.rows, before.retained_rows) == (0, 6)
    assert d.index.rollback(d.callers["manager"], Rollback(1, 0, ("g0", "g1")), 0.0)
    assert d.index.stats(0.0).retained_bytes == before.retained_bytes and d.index.stats(0.0).bytes == 0
    assert d.index.drop(d.callers["manager"], "g0", "non_finite_update", 0.0)
    d.index.commit_step(d.callers["actor"], TrainedStep(1, 1, {"g1": 2}), 0.0)
    assert d.collect() == 3 and d.index.stats(0.0).retained_rows == 3
    d.index.gc(d.callers["actor"], 1, 0.0)
    assert d.collect() == 3
    after = d.index.stats(0.0)
    assert (after.rows, after.bytes, after.retained_rows, after.retained_bytes) == (0, 0, 0, 0)


def test_what_is_taken_back_is_not_held_back_for_older_groups() -> None:
    """It was trained in that step before; the older one, that is still being made, was not."""
    d = Driver()
    d.ready_group("g0", 0, min_version=5)
    d.granted("actor", max_items=9)
    d.index.commit_step(d.callers["actor"], TrainedStep(1, 1, {"g0": 2}), 0.0)
    d.admit("late", 1, min_version=0)
    d.index.rollback(d.callers["manager"], Rollback(1, 0, ("g0",)), 0.0)
    batch = d.granted("actor", max_items=9, version=version(9), max_token_lag=0, slots_left=1, hold_below=version(9))
    assert [g.group_id for g in batch.groups] == ["g0"]


# -- events


def test_events_are_kept_until_acknowledged() -> None:
    d = Driver()
    d.ready_group("g0", 0)
    first = d.events()
    assert [e.kind for e in first] == [EventKind.COMPLETE]
    assert d.events() == first
    d.ack("actor", d.granted("actor").lease_id, step=4)
    trained = d.events(after=first[-1].seq)
    assert [(e.kind, e.group_id, e.step) for e in trained] == [(EventKind.TRAINED, "g0", 4)]
    assert d.events() == trained


def test_a_complete_event_carries_what_a_judge_needs() -> None:
    d = Driver()
    d.admit("g0", 0, size=2)
    grant = d.granted("rollout")
    d.put("rollout", [d.sample("g0", 1)], grant.lease_id)
    d.index.tombstone(d.callers["rollout"], "g0", 0, "timeout", grant.lease_id, 0.0)
    d.ack("rollout", grant.lease_id)
    assert not d.events()
    d.score(value=0.25)
    (event,) = d.events()
    assert [(m.k, m.tombstone, m.reward, m.accuracy) for m in event.members] == [
        (0, "timeout", None, None),
        (1, None, 0.25, 0.25),
    ]

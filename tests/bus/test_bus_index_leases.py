"""The index: leases, redelivery, fencing, selection."""

from __future__ import annotations

import pytest
from bus_driver import EVAL, Driver, version

from bus.errors import BusError, Fenced, IncompleteGroup, IncompleteRow, LeaseLost
from bus.records import DRAIN, TRAINING, Closed, Empty, EventKind, Grant, LeaseRequest, TrainedStep, VerdictKind


def test_a_repeated_lease_call_returns_the_same_batch() -> None:
    """A lost reply is asked for again under the same lease id."""
    d = Driver()
    d.admit("g0", 0)
    d.admit("g1", 1)
    first = d.lease("rollout", lease_id="L")
    assert first == d.lease("rollout", lease_id="L")
    assert isinstance(first, Grant)
    assert d.granted("rollout").groups[0].group_id == "g1"


def test_an_expired_lease_is_redelivered_and_its_holder_may_neither_write_nor_acknowledge() -> None:
    d = Driver()
    d.admit("g0", 0)
    old = d.granted("rollout")
    d.now = 9.9
    assert isinstance(d.lease("rollout"), Empty)
    d.now = 10.0
    new = d.granted("rollout")
    assert new.groups[0].group_id == "g0"
    with pytest.raises(LeaseLost):
        d.put("rollout", [d.sample("g0", 0)], old.lease_id)
    with pytest.raises(LeaseLost):
        d.ack("rollout", old.lease_id)
    assert d.index.stats(d.now).counters["redelivered"] == 1


def test_an_extended_lease_does_not_expire() -> None:
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    d.now = 9.0
    d.index.extend(d.callers["rollout"], grant.lease_id, d.now)
    d.now = 18.9
    assert isinstance(d.lease("rollout"), Empty)
    d.now = 19.0
    assert isinstance(d.lease("rollout"), Grant)


def test_a_redelivered_group_lists_the_members_already_there() -> None:
    d = Driver()
    d.admit("g0", 0, size=3)
    grant = d.granted("rollout")
    d.put("rollout", [d.sample("g0", 1)], grant.lease_id)
    d.release("rollout", grant.lease_id)
    group = d.granted("rollout").groups[0]
    assert group.done == (1,)
    assert group.missing == (0, 2)


def test_a_rollout_lease_with_unfinished_members_cannot_be_acknowledged() -> None:
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    d.put("rollout", [d.sample("g0", 0)], grant.lease_id)
    with pytest.raises(IncompleteGroup, match=r"\[1\]"):
        d.ack("rollout", grant.lease_id)
    d.index.tombstone(d.callers["rollout"], "g0", 1, "abort", grant.lease_id, d.now)
    assert d.ack("rollout", grant.lease_id).acked == 1


def test_a_new_incarnation_gets_the_leases_of_the_old_back_and_fences_it() -> None:
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    old = d.callers["rollout"]
    d.callers["rollout"] = d.index.register("rollout", d.now)
    assert d.callers["rollout"].incarnation == old.incarnation + 1
    with pytest.raises(Fenced):
        d.index.plan_put(old, "p", (d.sample("g0", 0),), grant.lease_id, False, d.now, lambda partition: 0)
    with pytest.raises(Fenced):
        d.index.ack(old, grant.lease_id, None, None, d.now)
    assert d.index.stats(d.now).counters["fenced"] == 2
    assert d.granted("rollout").groups[0].group_id == "g0"


def test_a_put_planned_by_an_old_incarnation_does_not_become_visible() -> None:
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    old = d.callers["rollout"]
    plan = d.plan("rollout", [d.sample("g0", 0)], grant.lease_id)
    d.callers["rollout"] = d.index.register("rollout", d.now)
    with pytest.raises(Fenced):
        d.index.commit_put(old, plan.put_id, d.now)
    with pytest.raises(LeaseLost):
        d.index.commit_put(d.callers["rollout"], plan.put_id, d.now)
    assert d.index.account().produced == 0


def test_a_lease_covers_only_its_own_rows() -> None:
    d = Driver()
    d.admit("g0", 0)
    d.admit("g1", 1)
    grant = d.granted("rollout")
    with pytest.raises(BusError, match="does not cover"):
        d.put("rollout", [d.sample("g1", 0)], grant.lease_id)


@pytest.mark.parametrize("reason", ["crash", DRAIN])
def test_a_group_is_dead_lettered_after_the_last_delivery_but_draining_does_not_count(reason: str) -> None:
    d = Driver(max_deliveries=2)
    d.admit("g0", 0)
    for _ in range(2):
        d.release("rollout", d.granted("rollout").lease_id, reason)
    if reason == DRAIN:
        assert isinstance(d.lease("rollout"), Grant)
        return
    assert isinstance(d.lease("rollout"), Empty)
    kinds = [event.kind for event in d.events()]
    assert kinds.count(EventKind.DEAD_ROW) == 2
    complete = next(event for event in d.events() if event.kind is EventKind.COMPLETE)
    assert [member.tombstone for member in complete.members] == ["dead_letter", "dead_letter"]
    assert d.index.account().produced == 0


def test_a_row_that_kills_its_scorer_becomes_a_tombstone() -> None:
    d = Driver(max_deliveries=2)
    d.admit("g0", 0)
    d.generate()
    for _ in range(2):
        d.release("reward", d.granted("reward", max_items=1).lease_id)
    d.score()
    account = d.index.account()
    assert account.dropped == {"dead_letter": 1}
    assert (account.queued, account.balanced) == (1, True)
    dead = [event for event in d.events() if event.kind is EventKind.DEAD_ROW]
    assert [(event.row_id, event.reason) for event in dead] == [("g0/0/0", "reward")]


def test_rows_that_already_carry_the_result_are_not_offered_again() -> None:
    """A scorer that died between put and acknowledgement."""
    d = Driver()
    d.admit("g0", 0)
    d.generate()
    grant = d.granted("reward", max_items=2, produces=("reward",))
    d.put("reward", [d.reward_of("g0/0/0")], grant.lease_id)
    d.release("reward", grant.lease_id)
    assert [row.row_id for row in d.granted("reward", max_items=2, produces=("reward",)).rows] == ["g0/1/0"]


def test_generation_is_first_in_first_out_by_version_and_sequence() -> None:
    d = Driver()
    d.admit("late", 7, min_version=1)
    d.admit("old", 9, min_version=0)
    d.admit("early", 5, min_version=1)
    order = [d.granted("rollout").groups[0].group_id for _ in range(3)]
    assert order == ["old", "early", "late"]


def test_an_instance_below_the_min_version_of_a_group_does_not_get_it() -> None:
    d = Driver()
    d.admit("g0", 0, min_version=3)
    assert d.lease("rollout", version=version(2)) == Empty("version")
    assert isinstance(d.lease("rollout", version=version(3)), Grant)


def test_the_actor_gets_whole_groups_only() -> None:
    """behaviour: B26"""
    d = Driver()
    d.admit("a", 0, size=2)
    d.admit("b", 1, size=2)
    d.generate()
    grant = d.granted("rollout")
    d.put("rollout", [d.sample("b", 1)], grant.lease_id)
    scored = d.score()
    assert scored == ["a/0/0", "a/1/0", "b/1/0"]
    d.judge("a")
    d.judge("b")
    batch = d.granted("actor", max_items=8)
    assert [row.row_id for row in batch.rows] == ["a/0/0", "a/1/0"]
    assert isinstance(d.lease("actor", max_items=8), Empty)


def test_a_group_with_a_tombstone_is_trained_without_that_member() -> None:
    d = Driver()
    d.admit("g0", 0, size=3)
    grant = d.granted("rollout")
    d.put("rollout", [d.sample("g0", 0), d.sample("g0", 2)], grant.lease_id)
    d.index.tombstone(d.callers["rollout"], "g0", 1, "abort", grant.lease_id, d.now)
    d.ack("rollout", grant.lease_id)
    d.score()
    d.judge("g0")
    batch = d.granted("actor")
    assert [row.row_id for row in batch.rows] == ["g0/0/0", "g0/2/0"]
    d.ack("actor", batch.lease_id, step=1)
    assert d.index.account().trained == 2


def test_a_split_trajectory_is_complete_with_all_its_segments() -> None:
    d = Driver()
    d.admit("g0", 0, size=1)
    grant = d.granted("rollout", rows_per_member=2)
    d.put("rollout", [d.sample("g0", 0, 0, segments=2)], grant.lease_id)
    d.score()
    with pytest.raises(IncompleteGroup):
        d.ack("rollout", grant.lease_id)
    d.put("rollout", [d.sample("g0", 0, 1, segments=2)], grant.lease_id)
    d.ack("rollout", grant.lease_id)
    assert not d.events()
    d.score()
    d.judge("g0")
    assert [row.row_id for row in d.granted("actor").rows] == ["g0/0/0", "g0/0/1"]
    assert d.index.account().queued == 1


def test_the_reference_waits_for_the_verdict_unless_rows_are_accepted_as_they_arrive() -> None:
    for accept_rows in (False, True):
        d = Driver()
        d.admit("g0", 0, accept_rows=accept_rows)
        d.admit("e0", 1, purpose=EVAL)
        d.generate()
        d.generate()
        assert isinstance(d.lease("ref", max_items=9), Grant if accept_rows else Empty)
        d.score()
        d.judge("g0")
        if not accept_rows:
            assert [row.group_id for row in d.granted("ref", max_items=9).rows] == ["g0", "g0"]


def test_a_group_with_too_old_a_token_is_dropped_as_stale() -> None:
    d = Driver()
    d.index.set_version(d.callers["actor"], 5, 5, 5, d.now)
    d.admit("old", 0, min_version=0)
    d.admit("new", 1, min_version=3)
    d.generate(oldest_version=2)
    d.generate(oldest_version=3)
    d.score()
    d.judge("old")
    d.judge("new")
    batch = d.granted("actor", max_items=8, version=version(5), max_token_lag=2)
    assert {row.group_id for row in batch.rows} == {"new"}
    assert d.index.account().dropped == {"stale": 2}
    assert [
        (event.group_id, event.reason, event.samples) for event in d.events() if event.kind is EventKind.DROPPED
    ] == [("old", "stale", {"stale": 2})]


def test_lag_is_counted_in_steps_where_a_rollback_repeated_versions() -> None:
    d = Driver()
    for published, step in ((2, 2), (3, 3), (4, 3)):
        d.index.set_version(d.callers["actor"], published, step, step, d.now)
    assert [d.index.state.lag(version) for version in (1, 2, 3, 4)] == [2, 1, 0, 0]
    with pytest.raises(BusError, match="only grow"):
        d.index.set_version(d.callers["actor"], 3, 3, 3, d.now)


def test_what_is_trained_again_lags_as_it_did_the_first_time() -> None:
    """Nothing is published then: the newest version is that of a step which is yet to come."""
    d = Driver()
    d.index.set_version(d.callers["actor"], 9, 9, 6, d.now)
    assert [d.index.state.lag(version) for version in (4, 6, 8, 9)] == [2, 0, 0, 0]


def test_overdue_groups_keep_their_slots_of_the_step() -> None:
    """behaviour: B18. Two slots left, one overdue group still running: only one newer group fits."""
    d = Driver()
    d.admit("overdue", 0, min_version=0)
    running = d.granted("rollout")
    for i in (1, 2):
        d.ready_group(f"new{i}", i, min_version=1)
    rule = {"max_items": 8, "slots_left": 2, "hold_below": version(0)}
    first = d.granted("actor", **rule)
    assert [g.group_id for g in first.groups] == ["new1"]
    assert d.lease("actor", **(rule | {"slots_left": 1})) == Empty("held")
    d.put("rollout", [d.sample("overdue", 0), d.sample("overdue", 1)], running.lease_id)
    d.ack("rollout", running.lease_id)
    d.score()
    d.judge("overdue")
    assert [g.group_id for g in d.granted("actor", **(rule | {"slots_left": 1})).groups] == ["overdue"]


def test_a_dropped_overdue_group_frees_its_slot() -> None:
    """behaviour: B18"""
    d = Driver()
    d.admit("overdue", 0, min_version=0)
    d.granted("rollout")
    d.ready_group("new", 1, min_version=1)
    rule = {"slots_left": 1, "hold_below": version(0)}
    assert d.lease("actor", **rule) == Empty("held")
    d.index.drop(d.callers["manager"], "overdue", "deadline", d.now)
    assert [g.group_id for g in d.granted("actor", **rule).groups] == ["new"]


def test_what_a_crashed_actor_held_is_offered_again_and_keeps_its_overdue_slot() -> None:
    d = Driver()
    d.ready_group("overdue", 0, min_version=0)
    d.ready_group("new", 1, min_version=1)
    rule = {"slots_left": 1, "hold_below": version(0)}
    assert [g.group_id for g in d.granted("actor", **rule).groups] == ["overdue"]
    d.callers["actor"] = d.index.register("actor", d.now)
    assert d.index.state.waiting_by_version == {0: 1, 1: 1}
    assert [g.group_id for g in d.granted("actor", **rule).groups] == ["overdue"]


def test_a_group_that_the_actor_holds_cannot_be_dropped() -> None:
    d = Driver()
    d.ready_group("g0", 0)
    batch = d.granted("actor")
    assert d.index.drop(d.callers["manager"], "g0", "deadline", d.now) is False
    assert d.ack("actor", batch.lease_id, step=1).acked == 1


def test_a_step_is_committed_with_all_its_leases_and_its_version_or_not_at_all() -> None:
    """behaviour: B16"""
    d = Driver()
    for position, group in enumerate(("g0", "g1")):
        d.ready_group(group, position)
    lost = d.granted("actor", max_items=1)
    d.now = 5.0
    held = d.granted("actor", max_items=1)
    d.now = 10.0
    actor = d.callers["actor"]
    groups = {"g0": 2, "g1": 2}
    with pytest.raises(BusError, match="versions only grow"):
        d.index.commit_step(actor, TrainedStep(1, -1, groups), d.now)
    assert d.index.account().trained == 0 and d.index.state.version == 0
    with pytest.raises(LeaseLost):
        d.index.extend(actor, lost.lease_id, d.now)
    result = d.index.commit_step(actor, TrainedStep(1, 1, groups), d.now)
    assert (result.acked, result.void) == (2, ()), "a lease that expired meanwhile does not undo the step"
    assert not d.index.is_leased(held.lease_id)
    assert d.index.account().trained == 4 and d.index.state.version == 1
    trained = [e for e in d.index.events(d.callers["manager"], 0, d.now) if e.kind is EventKind.TRAINED]
    assert [(event.step, event.version) for event in trained] == [(1, 1), (1, 1)]
    assert d.index.commit_step(actor, TrainedStep(1, 1, groups), d.now) == result, "a lost answer is given again"
    assert d.index.account().trained == 4
    with pytest.raises(BusError, match="committed before"):
        d.index.commit_step(actor, TrainedStep(1, 2, groups), d.now)
    assert isinstance(d.lease("actor", max_items=9), Empty)


def test_a_put_may_acknowledge_what_it_completes() -> None:
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    first = d.put("rollout", [d.sample("g0", 0)], grant.lease_id, ack=True)
    assert not first.ended and d.index.is_leased(grant.lease_id), "member 1 is missing"
    rows = [d.sample("g0", 1)]
    assert d.put("rollout", rows, grant.lease_id, ack=True).ended
    assert not d.index.is_leased(grant.lease_id)
    scoring = d.granted("reward", max_items=2)
    one, two = (d.reward_of(row.row_id) for row in scoring.rows)
    assert not d.put("reward", [one], scoring.lease_id, ack=True).ended
    assert isinstance(d.lease("reward"), Empty), "neither row is handed out again"
    assert d.put("reward", [two], scoring.lease_id, ack=True).ended
    d.now += 100.0
    assert isinstance(d.lease("reward"), Empty)


def test_a_put_whose_answer_was_lost_after_its_lease_ended_is_only_repeated() -> None:
    """behaviour: B16"""
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    rows = [d.sample("g0", 0), d.sample("g0", 1)]
    assert d.put("rollout", rows, grant.lease_id, ack=True).stored == 2 * len(rows[0].fields)
    again = d.put("rollout", rows, grant.lease_id, ack=True)
    assert (again.stored, again.repeated, again.ended) == (0, 2 * len(rows[0].fields), True)
    assert d.ack("rollout", grant.lease_id).acked == 0, "an acknowledgement may be repeated too"
    with pytest.raises(LeaseLost):
        d.put("rollout", rows, grant.lease_id)
    d.callers["rollout"] = d.index.register("rollout", d.now)
    with pytest.raises(LeaseLost):
        d.put("rollout", rows, grant.lease_id, ack=True)


def test_nothing_new_is_put_under_a_lease_that_was_acknowledged() -> None:
    d = Driver()
    d.admit("g0", 0)
    grant = d.granted("rollout")
    d.put("rollout", [d.sample("g0", 0), d.sample("g0", 1)], grant.lease_id, ack=True)
    d.index.tombstone(d.callers["manager"], "g0", 1, "x", None, d.now)
    with pytest.raises(LeaseLost, match="nothing new"):
        d.put("rollout", [d.sample("g0", 0, segment=1)], grant.lease_id, ack=True)


def test_closed_is_another_answer_than_empty() -> None:
    """behaviour: B17"""
    d = Driver()
    d.admit("g0", 0)
    d.index.close_topic(d.callers["manager"], "prompts", d.now)
    grant = d.granted("rollout")
    assert isinstance(d.lease("rollout"), Empty), "the leased group may come back"
    d.put("rollout", [d.sample("g0", 0), d.sample("g0", 1)], grant.lease_id)
    d.ack("rollout", grant.lease_id)
    assert d.lease("rollout") == Closed("rollout")
    assert isinstance(d.lease("actor"), Empty)
    d.score()
    assert d.lease("reward") == Closed("reward")
    d.judge("g0", VerdictKind.FILTERED, "constant")
    assert d.lease("actor") == Closed("actor")
    assert d.admit("g1", 1).refused == (("g1", "closed"),)


def test_the_trainer_does_not_wait_for_groups_that_it_holds_itself() -> None:
    """behaviour: B12 B17

    The last step of a finite source is a smaller one.
    """
    d = Driver()
    d.ready_group("g0", 0)
    d.ready_group("g1", 1)
    d.index.close_topic(d.callers["manager"], TRAINING, d.now)
    held = d.granted("actor", max_items=1)
    assert isinstance(d.granted("actor", max_items=1), Grant)
    assert d.lease("actor") == Closed("actor")
    d.index.release(d.callers["actor"], held.lease_id, None, "failed", d.now)
    assert isinstance(d.lease("actor"), Grant), "what was handed back comes again"


def test_training_can_be_closed_while_evaluations_go_on() -> None:
    """behaviour: B17"""
    d = Driver()
    d.ready_group("g0", 0)
    d.index.close_topic(d.callers["manager"], TRAINING, d.now)
    assert d.admit("g1", 1).refused == (("g1", "closed"),)
    d.ack("actor", d.granted("actor").lease_id, step=1)
    assert d.lease("actor") == Closed("actor")
    assert d.admit("e0", 2, purpose=EVAL).stored == 1
    assert isinstance(d.lease("rollout"), Grant)


def test_an_unknown_task_is_refused() -> None:
    d = Driver()
    with pytest.raises(BusError, match="unknown task"):
        d.index.lease(d.callers["ref"], LeaseRequest("critic", ("tokens",), lease_id="x"), 0.0)


def test_a_teacher_gets_the_rows_that_are_routed_to_it_and_no_others() -> None:
    d = Driver()
    for seq, teacher in enumerate(("math", "code")):
        d.admit(f"g{seq}", seq, accept_rows=True)
        d.generate(teacher=teacher)
    grants = {t: d.granted(f"teacher:{t}", owner="ref", max_items=10) for t in ("math", "code")}
    assert {row.group_id for row in grants["math"].rows} == {"g0"}
    assert {row.group_id for row in grants["code"].rows} == {"g1"}
    assert d.granted("ref", max_items=10).rows and len(d.granted("reward", max_items=10).rows) == 4


def test_a_teacher_that_waits_is_woken_by_its_rows_and_by_the_end() -> None:
    d = Driver()
    d.admit("g0", 0, accept_rows=True)
    assert isinstance(d.lease("teacher:math", owner="ref"), Empty)
    d.index.take_woken()
    d.generate(teacher="math")
    assert "teacher:math" in d.index.take_woken()
    d.index.close_topic(d.callers["manager"], "prompts", d.now)
    assert "teacher:math" in d.index.take_woken()


def test_a_row_is_not_acknowledged_without_what_its_holder_produces() -> None:
    """Else nobody would be asked for it again, and its group would never be complete."""
    d = Driver()
    d.admit("g0", 0)
    d.generate()
    lease = d.granted("reward", max_items=2)
    d.put("reward", [d.reward_of("g0/0/0")], lease.lease_id)
    with pytest.raises(IncompleteRow, match="g0/1/0"):
        d.ack("reward", lease.lease_id)
    d.put("reward", [d.reward_of("g0/1/0")], lease.lease_id)
    assert d.ack("reward", lease.lease_id).acked == 2

"""A new epoch of the bus: what the ledger and the trainer tell an empty index of those before."""

from __future__ import annotations

from bus_driver import Driver

from bus.index import Index
from bus.records import Empty, EventKind, PutPlan, TrainedStep


def seeded(d: Driver, through_step: int = 0, **fates: int) -> bool:
    return d.index.seed(d.callers["manager"], fates, through_step, 0, d.now)


def recommit(d: Driver, *steps: TrainedStep) -> int | None:
    return d.index.recommit(d.callers["actor"], steps, d.now)


def test_the_account_goes_on_from_what_the_ledger_says_and_is_told_once() -> None:
    """behaviour: B16"""
    d = Driver()
    assert seeded(d, 3, trained=12, stale=2)
    assert not seeded(d, 3, trained=12, stale=2)
    account = d.index.account()
    assert (account.produced, account.trained, account.dropped, account.balanced) == (14, 12, {"stale": 2}, True)


def test_a_step_that_the_ledger_missed_counts_once_whether_its_groups_came_before_it_or_after() -> None:
    """behaviour: B12"""
    d = Driver()
    assert recommit(d, TrainedStep(2, 2, {"g0": 2})) is None
    seeded(d, 1, trained=4)
    d.admit("g0", 0)
    d.admit("g1", 1)
    d.generate()  # g0 again: its samples are the ones that were trained, so they do not count twice
    steps = [TrainedStep(1, 1, {"old": 2}), TrainedStep(2, 2, {"g0": 2, "g2": 2})]
    assert recommit(d, *steps) == 1
    assert recommit(d, *steps) == 0
    account = d.index.account()
    assert (account.produced, account.trained, account.balanced) == (8, 8, True)
    told = [(e.group_id, e.step, e.samples) for e in d.events() if e.kind is EventKind.TRAINED]
    assert told == [("g0", 2, {"trained": 2}), ("g2", 2, {"trained": 2})]
    assert d.admit("g2", 2).refused == (("g2", "trained"),)
    [left] = d.granted("rollout", max_items=9).groups
    assert left.group_id == "g1"
    assert (d.index.state.version, d.index.state.step) == (2, 2)


def test_a_group_whose_prompt_is_on_its_way_when_its_step_is_told_is_not_trained_again() -> None:
    """behaviour: B12. Between the plan of a put and its commit other calls take their turn."""
    d = Driver()
    seeded(d)
    plan = d.plan("manager", [d.admission("g0", 0)])
    assert isinstance(plan, PutPlan)
    recommit(d, TrainedStep(1, 1, {"g0": 2}))
    result = d.index.commit_put(d.callers["manager"], plan.put_id, d.now)
    assert (result.stored, result.refused) == (0, (("g0", "trained"),))
    assert isinstance(d.lease("rollout"), Empty)
    account = d.index.account()
    assert (account.produced, account.trained, account.balanced) == (2, 2, True)
    d.collect()
    assert not d.index.state.rows and d.index.state.prompt_rows == 0


def test_a_group_that_the_trainer_took_already_is_not_waited_for_by_the_generator() -> None:
    d = Driver()
    seeded(d)
    d.admit("g0", 0)
    lease = d.granted("rollout")
    recommit(d, TrainedStep(1, 1, {"g0": 2}))
    assert d.put("rollout", [d.sample("g0", 0)], lease.lease_id).refused == (("g0/0/0", "terminal"),)
    d.ack("rollout", lease.lease_id)
    assert d.index.account().balanced
    d.index.take_garbage()
    assert not d.index.state.rows


def test_a_reply_never_ends_within_a_step(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Else the ledger could know a step whose groups it has not all seen."""
    import bus.index

    monkeypatch.setattr(bus.index, "EVENTS_PER_REPLY", 2)
    d = Driver()
    seeded(d)
    recommit(d, TrainedStep(1, 1, {f"g{n}": 2 for n in range(5)}), TrainedStep(2, 2, {"h": 2}))
    first = d.events()
    assert [e.group_id for e in first] == ["g0", "g1", "g2", "g3", "g4"]
    assert [e.group_id for e in d.events(after=first[-1].seq)] == ["h"]
    assert isinstance(d.index, Index)


def test_an_admission_that_comes_when_its_group_has_ended_and_is_forgotten_is_not_a_new_one() -> None:
    """behaviour: B12

    Its answer was lost, and by the time it is repeated the group is trained, recorded and collected.
    """
    d = Driver()
    d.ready_group("g0", 0)
    d.ack("actor", d.granted("actor").lease_id, step=1)
    d.index.gc(d.callers["actor"], 1, d.now)
    d.events(after=d.events()[-1].seq)
    assert "g0" not in d.index.state.groups
    assert d.admit("g0", 0).refused == (("g0", "terminal"),)
    assert isinstance(d.lease("rollout"), Empty)
    assert d.admit("g0", 0, attempt=2).stored == 1, "a further attempt is meant"

"""Accounts and figures, derived from the state of groups and members at one instant."""

from __future__ import annotations

from collections import Counter

from bus.index.state import TRAINED, State
from bus.index.tasks import TaskQueues
from bus.records import Account, BusStats, HeldLease


def account(state: State) -> Account:
    """Count train samples by fate (B16).

    `produced` was counted when each sample first became visible; the right side of the equation
    is derived here from the members themselves and from the sums of groups already forgotten. So
    the equation is a check, not a tautology.
    """
    fates: Counter[str] = Counter(state.settled)
    queued = running = waiting = 0
    for group in state.groups.values():
        if not group.is_train:
            continue
        if group.tally is not None:
            fates.update(group.tally)
            continue
        for member in group.members:
            if member.counted:
                if member.fate is None:
                    queued += 1
                else:
                    fates[member.fate] += 1
            elif group.fate is None and member.tombstone is None:
                if group.rollout.lease_id is None:
                    waiting += 1
                else:
                    running += 1
    trained = fates.pop(TRAINED, 0)
    return Account(state.produced, trained, dict(fates), queued, running, waiting)


def snapshot(state: State, queues: TaskQueues, epoch: str, now: float) -> BusStats:
    budget = state.budget
    unfinished = [group for group in state.groups.values() if group.fate is None]
    return BusStats(
        epoch=epoch,
        account=account(state),
        eval_produced=state.eval_produced,
        eval_held=sum(m.visible for group in unfinished if not group.is_train for m in group.members),
        rows=budget.used_rows,
        bytes=budget.used_bytes,
        reserved_rows=budget.reserved_rows,
        reserved_bytes=budget.reserved_bytes,
        retained_rows=budget.retained_rows,
        retained_bytes=budget.retained_bytes,
        max_rows=budget.max_rows,
        max_bytes=budget.max_bytes,
        retained_max_bytes=budget.retained_max_bytes,
        open_groups=len(unfinished),
        ready=queues.sizes(),
        leases=dict(Counter(lease.task for lease in state.leases.values())),
        held=tuple(
            HeldLease(lease.task, lease.owner, len(lease.items), now - lease.since) for lease in state.leases.values()
        ),
        counters=dict(state.counters),
        version=state.version,
        step=state.step,
        oldest_min_version=min((group.spec.min_version for group in unfinished if group.is_train), default=None),
        oldest_age_s=max((now - group.admitted_at for group in unfinished), default=0.0),
        events_pending=len(state.events),
        closed=tuple(sorted(state.closed)),
    )

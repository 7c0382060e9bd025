"""The life of prompt groups: admitted, judged when complete, trained or dropped; every change in the ledger.

source ─▶ ledger.admit ─▶ bus.admit      a crash in between leaves an open group, attempted again
bus event ─▶ bus.judge ─▶ ledger.record  every end of a group is an event of the bus; it counts once, because its
                                         position is in the same transaction, and a verdict may be given twice
an empty bus ◀─ ledger                   after its loss: what ended is told, what is open is attempted again
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bus.client import BusClient
from bus.errors import BusError, BusTimeout, BusUnavailable
from bus.records import (
    CLOSED,
    DEAD_LETTER,
    TRAINING,
    Caller,
    Event,
    EventKind,
    GroupAdmission,
    Rollback,
    Verdict,
    VerdictKind,
)
from relax.config.faults import Point
from relax.config.sections import RolloutArgs
from relax.control.admission import AdmissionState, Limits
from relax.control.judge import FilterStreak, Member, NoSignal, judge_group
from relax.control.retired import RetiredPrompts
from relax.data.source import PromptSource
from relax.plugins import load_function
from relax.telemetry.time_split import WAIT_DATA, WORK
from relax.types import GroupId, PolicyVersion, Prompt, Purpose
from services.bus_link import BUS_TIMEOUTS, BusLink
from services.rollout.api import ActorState
from services.rollout.ledger import AdmissionEntry, EventPosition, Ledger, Terminal, TerminalState
from services.runtime import RoleReporter

logger = logging.getLogger("ray.serve")

LONG_POLL_S = 2.0
PUT_DEADLINE_S = 60.0
DROP_CHECK_S = 0.5
GONE_POLL_S = 0.2
RenewBus = Callable[[str, str], Awaitable[None]]
"""Asks the owner of the bus for an empty one in the place of that of an epoch, for a reason; it comes later."""


@dataclass(slots=True)
class _Changes:
    """What a batch of events asks for."""

    verdicts: list[Verdict] = field(default_factory=list)
    ended: list[Terminal] = field(default_factory=list)


class GroupKeeper:
    """Owns ledger, source and admission; the only writer of all three."""

    def __init__(
        self,
        args: RolloutArgs,
        ledger: Ledger,
        source: PromptSource,
        bus: BusClient,
        reporter: RoleReporter,
        renew_bus: RenewBus,
    ):
        self._renew_bus = renew_bus
        self.args, self.ledger, self.source, self.bus, self.reporter = args, ledger, source, bus, reporter
        self.link = BusLink(bus, reporter, self._refill)
        counts = ledger.counts()
        self.admission = AdmissionState(
            Limits.from_run(args.run),
            version=ledger.newest_version,
            trained=counts.trained,
            filtered=counts.filtered,
            dropped=counts.dropped,
        )
        kind = args.rollout.filter.kind
        self.own_filter = load_function(kind, Path.cwd()) if ":" in kind else None
        self.streak = FilterStreak(source.name, args.rollout.filter)
        filtered = ledger.terminals(TerminalState.FILTERED)
        self.retired = RetiredPrompts(source.name, args.rollout.filter, [(t.group_id, t.reason) for t in filtered])
        self.next_seq = ledger.next_seq
        self.on_eval: Callable[[Event], None] = lambda event: None
        self.on_loss: Callable[[], None] = lambda: None
        """Called when an empty bus takes the place of one that may have held evaluations."""
        self.finished = asyncio.Event()
        """All groups have ended, for as long as the trainer does not go back."""
        self.reopened = asyncio.Event()
        """The opposite of `finished`."""
        self.reopened.set()
        self.step = ledger.trained_through
        """The newest committed training step."""
        self._stepped = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._applying = asyncio.Lock()
        """Held while events change the ledger, and while an empty bus is filled from it."""
        self._closed: list[str] = []
        self._waiting: deque[AdmissionEntry] = deque()
        """Open groups that the bus does not have."""
        self._epoch: int | None = None
        """Of the last prompt that was admitted here."""
        cursor = ledger.last_cursor()
        if cursor is not None:
            source.load_state_dict(cursor)

    # ------------------------------------------------------------------ admission

    async def take_up(self) -> None:
        """At the start of a manager: what an earlier one left open, in its bus or in an empty one."""
        await self.link.until_done(self._take_up)

    async def _take_up(self) -> None:
        async with self._applying:
            await self._tell_and_readmit()

    async def _refill(self) -> None:
        """The bus was lost: the empty one takes up where the ledger stands."""
        self.on_loss()
        async with self._applying:
            await self._tell_and_readmit()
            if self._waiting:  # what was closed is open again until they are in, and have ended
                self._closed.clear()
            for topic in self._closed:
                await self.bus.close_topic(topic)

    async def _tell_and_readmit(self) -> None:
        """Tell a bus that has just begun where the ledger stands. What is open and not in the bus waits for its next
        attempt, in the order of admission and before any new prompt."""
        lineage = await asyncio.to_thread(self.ledger.newest_lineage)
        fates = await asyncio.to_thread(self.ledger.sample_fates)
        if await self.bus.seed(fates, self.ledger.trained_through, lineage.number):
            if self.ledger.trained_through < lineage.published_step:
                # What was to be trained again from old rows is made anew: by the policy as it is now, not by a later.
                self.admission.version = max(self.admission.version, lineage.next_version)
        else:
            await self._follow_lineage()
        entries = await asyncio.to_thread(self.ledger.open_groups, Purpose.TRAIN)
        there = await self.bus.open_groups()
        self.admission.trained = (await asyncio.to_thread(self.ledger.counts)).trained
        now, here = time.monotonic(), {group.group_id for group in self.admission.open_groups}
        self._waiting.clear()
        for entry in entries:
            if entry.group_id not in there:
                self.admission.forget(entry.group_id)
                self._waiting.append(entry)
            elif entry.group_id not in here:
                self.admission.take_up(entry.group_id, entry.min_version, now, complete=there[entry.group_id])
        self._room.set()

    # ------------------------------------------------------------------ an actor that goes on

    async def go_on_from(self, actor: ActorState) -> PolicyVersion:
        """The actor trains on from a state that may be older than what was trained. Returns the version that the open
        groups ask for: when it is not published yet, that is for the actor to do.

        What was trained since is in flight again, in a new lineage: from the same rows where the bus has them, else
        the bus begins anew and all of it is generated again.
        """
        return await self.link.until_done(lambda: self._go_on_from(actor))

    async def _go_on_from(self, actor: ActorState) -> PolicyVersion:
        async with self._applying:
            trained = max((await self.bus.stats()).step, self.ledger.trained_through)
            if trained > actor.step:
                next_version = PolicyVersion(actor.newest_version + 1)
                await asyncio.to_thread(
                    self.ledger.start_lineage, actor.step, next_version, max(actor.published_step, trained)
                )
                self._closed.clear()  # roles ask again, and the last groups close them again
                self.reporter.count("rollbacks")
                self.reporter.count("steps_taken_back", trained - actor.step)
                logger.warning("steps %d to %d are trained again", actor.step + 1, trained)
            await self._follow_lineage()
            here = {group.group_id for group in self.admission.open_groups}
            here |= {entry.group_id for entry in self._waiting}
            entries = await asyncio.to_thread(self.ledger.open_groups, Purpose.TRAIN)
            self.admission.undo((e.group_id for e in entries if e.group_id not in here), time.monotonic())
            self.step = min(self.step, self.ledger.trained_through)
        self._room.set()
        return self.admission.version

    async def _follow_lineage(self) -> None:
        """Bring the bus to the ledger's newest lineage. Raises `BusUnavailable` where that takes a new bus, which then
        comes."""
        lineage = await asyncio.to_thread(self.ledger.newest_lineage)
        if not lineage.number:
            return
        back = Rollback(lineage.number, lineage.through_step, await asyncio.to_thread(self.ledger.taken_back))
        here = self.bus.caller
        kept = await self.bus.rollback(back)
        if not kept:
            reason = f"rows of steps after {lineage.through_step}, which are to be trained again, are gone"
            await self._renew_bus(here.epoch, reason)
            while self.bus.caller == here:  # until it is gone: `BusUnavailable`
                await self.bus.ping()
                await asyncio.sleep(GONE_POLL_S)
            raise BusUnavailable(reason)

    async def close(self, topic: str) -> None:
        """In this bus and in each that may follow it."""
        self._closed.append(topic)
        await self.link.until_done(lambda: self.bus.close_topic(topic))

    async def admit_loop(self) -> None:
        """Admit whenever there is capacity. `finished` while the run's groups are all trained, or the source has ended
        and none is left."""
        while not self.reporter.stopped.is_set():
            self._room.clear()
            with self.reporter.time_split.book(WORK):
                await self._admit_some()
            if self.admission.finished and not self._waiting:
                self.reopened.clear()
                self.finished.set()
            elif self.finished.is_set():
                self.finished.clear()
                self.reopened.set()
            await self._room.wait()

    async def _admit_some(self) -> None:
        """A bus that is lost meanwhile gets its groups from the ledger: what was to be put here is then not put."""
        async with self._applying:
            here = self.bus.caller
            again = self._take_waiting()
            new = self._take_new()
            if again:
                again = await asyncio.to_thread(self.ledger.readmit, again, self.admission.version)
            if new:
                await asyncio.to_thread(self.ledger.admit, new)
                if self._enters_epoch(new):
                    self.reporter.faults.passing(Point.EPOCH_BORDER)
        if again or new:
            await self.link.until_done(lambda: self._put([*again, *new], here))
            self.reporter.count("groups_readmitted", len(again))
            self.reporter.count("groups_admitted", len(new))
        if self.admission.exhausted and not self._waiting and TRAINING not in self._closed:
            await self.close(TRAINING)
        self.reporter.facts["skipped_rows"] = self.source.skipped

    def _take_waiting(self) -> list[AdmissionEntry]:
        entries: list[AdmissionEntry] = []
        while self._waiting and self.admission.capacity > 0:
            entries.append(self._waiting.popleft())
            self.admission.admit(entries[-1].group_id, time.monotonic())
        return entries

    def _take_new(self) -> list[AdmissionEntry]:
        entries: list[AdmissionEntry] = []
        while self.admission.capacity > 0 and not self.admission.exhausted:
            prompt = self._next_prompt()
            if prompt is None:
                self.admission.exhausted = True
                break
            min_version = self.admission.admit(prompt.group_id, time.monotonic())
            entries.append(
                AdmissionEntry(
                    seq=self.next_seq,
                    group_id=prompt.group_id,
                    attempt=1,
                    cursor=self.source.state_dict(),
                    min_version=min_version,
                    purpose=Purpose.TRAIN,
                    prompt=prompt.to_json(),
                )
            )
            self.next_seq += 1
        return entries

    def _enters_epoch(self, entries: Sequence[AdmissionEntry]) -> bool:
        before, self._epoch = self._epoch, entries[-1].prompt["epoch"]
        return before is not None and before != self._epoch

    def _next_prompt(self) -> Prompt | None:
        """The next one that no earlier epoch found too easy; None at the end of the source."""
        try:
            while (prompt := self.source.next()) is not None and self.retired.passes_over(prompt.group_id):
                self.reporter.count("prompts_retired")
        except NoSignal as error:
            self.reporter.end_run(str(error))
            return None
        return prompt

    async def next_step(self) -> None:
        """Wait until a step is committed, or the run's groups are all trained."""
        self._stepped.clear()
        waits = {asyncio.ensure_future(event.wait()) for event in (self._stepped, self.finished)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _put(self, entries: Sequence[AdmissionEntry], here: Caller) -> None:
        if self.bus.caller != here:
            return
        result = await self.bus.admit(
            [
                GroupAdmission(
                    group_id=entry.group_id,
                    seq=entry.seq,
                    group_size=self.args.run.group_size,
                    min_version=entry.min_version,
                    prompt=entry.prompt,
                    purpose=entry.purpose,
                    attempt=entry.attempt,
                    accept_rows=self.args.rollout.filter.kind == "none",
                )
                for entry in entries
            ],
            deadline_s=PUT_DEADLINE_S,
        )
        shut_out = [group_id for group_id, fate in result.settled if fate == CLOSED]
        if shut_out:
            raise BusError(f"{len(shut_out)} groups were admitted after the bus was closed to them: {shut_out[:3]}")

    # ------------------------------------------------------------------ events

    async def event_loop(self) -> None:
        """Follow the bus's feed; a position that the ledger holds already is skipped."""
        here, after = self.bus.caller, self._position(self.bus.caller)
        while not self.reporter.stopped.is_set():
            if self.bus.caller.epoch != here.epoch:
                after = self._position(self.bus.caller)
            here = self.bus.caller
            try:
                lineage = self.ledger.lineage
                with self.reporter.time_split.book(WAIT_DATA):
                    events = await self.bus.events(after, wait_s=LONG_POLL_S, caller=here)
                if events:
                    with self.reporter.time_split.book(WORK):
                        applied = await self._apply(events, here, lineage)
                    after = events[-1].seq if applied else after
            except BusTimeout:
                self.reporter.count(BUS_TIMEOUTS)
            except BusUnavailable:
                await self.link.rejoin(here)

    def _position(self, caller: Caller) -> int:
        position = self.ledger.event_position
        return position.event_seq if position and position.bus_epoch == caller.epoch else 0

    async def _apply(self, events: Sequence[Event], caller: Caller, lineage: int) -> bool:
        """Verdicts first: those that are given and not recorded are given again, the same, after a restart.

        False, and nothing is done, when another lineage has begun since they were read: some may be void.
        """
        async with self._applying:
            if caller.epoch != self.bus.caller.epoch:
                return True  # what they speak of is lost, or told to the new bus by the trainer
            if lineage != self.ledger.lineage:
                return False
            changes = _Changes()
            for event in events:
                if event.purpose is Purpose.EVAL:
                    self.on_eval(event)
                else:
                    self._read(event, changes)
            if changes.verdicts:
                await self.bus.judge(changes.verdicts, caller=caller)
                self.reporter.faults.passing(Point.BEFORE_ACK)
            position = EventPosition(caller.epoch, events[-1].seq)
            await asyncio.to_thread(self.ledger.record, changes.ended, position)
            self._forget_waiting(changes.ended)
            self._settle(changes.ended)
        self._room.set()
        return True

    def _forget_waiting(self, ended: Sequence[Terminal]) -> None:
        """What the trainer had taken, and a lost bus had not told of, may still wait here for its next attempt."""
        states = {terminal.group_id: terminal.state for terminal in ended}
        gone = [entry for entry in self._waiting if entry.group_id in states]
        for entry in gone:
            self._waiting.remove(entry)
            self.admission.trained += states[entry.group_id] is TerminalState.TRAINED

    def _settle(self, ended: Sequence[Terminal]) -> None:
        trained: dict[tuple[int, PolicyVersion], list[GroupId]] = defaultdict(list)
        for terminal in ended:
            if terminal.state is TerminalState.TRAINED:
                assert terminal.step is not None and terminal.version is not None
                trained[terminal.step, terminal.version].append(terminal.group_id)
            elif terminal.state is TerminalState.FILTERED:
                self.admission.mark_filtered(terminal.group_id)
                self.retired.note(terminal.group_id, terminal.reason)
                self.reporter.count("groups_filtered")
            else:
                self.admission.mark_dropped(terminal.group_id, terminal.reason)
                self.reporter.count("groups_dropped")
        for (step, version), groups in sorted(trained.items()):
            self.admission.step_committed(max(version, self.admission.version), groups)
            self.step = max(step, self.step)
            self._stepped.set()
            self.reporter.count("groups_trained", len(groups))

    def _read(self, event: Event, changes: _Changes) -> None:
        group_id, samples = GroupId(event.group_id), event.samples
        match event.kind:
            case EventKind.COMPLETE:
                changes.verdicts.append(self._judge(event, group_id))
            case EventKind.TRAINED:
                assert event.step is not None and event.version is not None
                version = PolicyVersion(event.version)
                changes.ended.append(Terminal(group_id, TerminalState.TRAINED, event.step, version, samples=samples))
            case EventKind.FILTERED | EventKind.DROPPED:
                state, reason = TerminalState(event.kind.value), event.reason or ""
                changes.ended.append(Terminal(group_id, state, reason=reason, samples=samples))
                if reason == DEAD_LETTER:
                    self.reporter.count("dead_letters")
            case EventKind.DEAD_ROW:
                self.reporter.count("dead_letters")

    def _judge(self, event: Event, group_id: GroupId) -> Verdict:
        self.admission.mark_complete(group_id)
        members = [
            Member(report.k, report.tombstone, report.reward, report.accuracy, report.reward_state)
            for report in event.members
        ]
        verdict = judge_group(
            members,
            self.args.run.group_size,
            self.args.rollout.min_group_size,
            self.args.rollout.filter,
            self.own_filter,
        )
        self.reporter.count("tombstones", sum(member.tombstone is not None for member in members))
        try:
            self.streak.observe(verdict)
        except NoSignal as error:
            self.reporter.end_run(str(error))
        return Verdict(group_id, VerdictKind(verdict.outcome.value), verdict.reason)

    # ------------------------------------------------------------------ late groups

    async def drop_loop(self) -> None:
        """Give up groups past their deadline, or too old by the policy (B18)."""
        while not self.reporter.stopped.is_set():
            await asyncio.sleep(DROP_CHECK_S)
            by_reason: dict[str, list[GroupId]] = defaultdict(list)
            for drop in self.admission.due_drops(time.monotonic()):
                by_reason[drop.reason.value].append(drop.group_id)
            for reason, groups in by_reason.items():
                with self.reporter.time_split.book(WORK):
                    await self.drop(groups, reason)

    async def drop(self, groups: Sequence[GroupId], reason: str) -> None:
        """End groups untrained, unless the trainer holds them. The bus says of each that it ended, then it counts."""
        verdicts = [Verdict(group, VerdictKind.DROPPED, reason) for group in groups]
        await self.link.until_done(lambda: self.bus.judge(verdicts))

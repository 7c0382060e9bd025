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
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bus.client import BusClient
from bus.errors import BusTimeout, BusUnavailable
from bus.records import DEAD_LETTER, TRAINING, Caller, Event, EventKind, GroupAdmission, Verdict, VerdictKind
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
from services.rollout.ledger import AdmissionEntry, EventPosition, Ledger, Terminal, TerminalState
from services.runtime import RoleReporter

logger = logging.getLogger("ray.serve")

LONG_POLL_S = 2.0
PUT_DEADLINE_S = 60.0
DROP_CHECK_S = 0.5


@dataclass(slots=True)
class _Changes:
    """What a batch of events asks for."""

    verdicts: list[Verdict] = field(default_factory=list)
    ended: list[Terminal] = field(default_factory=list)


class GroupKeeper:
    """Owns ledger, source and admission; the only writer of all three."""

    def __init__(self, args: RolloutArgs, ledger: Ledger, source: PromptSource, bus: BusClient, reporter: RoleReporter):
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
        self.step = 0
        """The newest committed training step."""
        self._stepped = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._applying = asyncio.Lock()
        """Held while events change the ledger, and while an empty bus is filled from it."""
        self._closed: list[str] = []
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
            for topic in self._closed:
                await self.bus.close_topic(topic)

    async def _tell_and_readmit(self) -> None:
        """Open groups get their next attempt in a bus that has just begun, else the present one once more."""
        fates = await asyncio.to_thread(self.ledger.sample_fates)
        empty = await self.bus.seed(fates, self.ledger.trained_through)
        entries = await asyncio.to_thread(self.ledger.open_groups, Purpose.TRAIN)
        if not entries:
            return
        now, here = time.monotonic(), {group.group_id for group in self.admission.open_groups}
        for entry in entries:
            if entry.group_id not in here:
                self.admission.admit(entry.group_id, now)
            elif empty:
                self.admission.readmit(entry.group_id, now)
        if empty:
            entries = await asyncio.to_thread(self.ledger.readmit, entries, self.admission.version)
            self.reporter.count("groups_readmitted", len(entries))
        await self._put(entries)

    async def close(self, topic: str) -> None:
        """In this bus and in each that may follow it."""
        self._closed.append(topic)
        await self.link.until_done(lambda: self.bus.close_topic(topic))

    async def admit_loop(self) -> None:
        """Admit whenever there is capacity, until the run's groups are all trained or the source has ended."""
        while not self.reporter.stopped.is_set():
            with self.reporter.time_split.book(WORK):
                await self._admit_some()
            if self.admission.finished:
                self.finished.set()
                return
            self._room.clear()
            await self._room.wait()

    async def _admit_some(self) -> None:
        entries: list[AdmissionEntry] = []
        now = time.monotonic()
        while self.admission.capacity > 0 and not self.admission.exhausted:
            prompt = self._next_prompt()
            if prompt is None:
                self.admission.exhausted = True
                break
            min_version = self.admission.admit(prompt.group_id, now)
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
        if entries:
            await asyncio.to_thread(self.ledger.admit, entries)
            if self._enters_epoch(entries):
                self.reporter.faults.passing(Point.EPOCH_BORDER)
            await self.link.until_done(lambda: self._put(entries))
            self.reporter.count("groups_admitted", len(entries))
        if self.admission.exhausted and TRAINING not in self._closed:
            await self.close(TRAINING)
        self.reporter.facts["skipped_rows"] = self.source.skipped

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

    async def _put(self, entries: Sequence[AdmissionEntry]) -> None:
        await self.bus.admit(
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

    # ------------------------------------------------------------------ events

    async def event_loop(self) -> None:
        """Follow the bus's feed; a position that the ledger holds already is skipped."""
        here, after = self.bus.caller, self._position(self.bus.caller)
        while not self.reporter.stopped.is_set():
            if self.bus.caller.epoch != here.epoch:
                after = self._position(self.bus.caller)
            here = self.bus.caller
            try:
                with self.reporter.time_split.book(WAIT_DATA):
                    events = await self.bus.events(after, wait_s=LONG_POLL_S, caller=here)
                if events:
                    with self.reporter.time_split.book(WORK):
                        await self._apply(events, here)
                    after = events[-1].seq
            except BusTimeout:
                self.reporter.count(BUS_TIMEOUTS)
            except BusUnavailable:
                await self.link.rejoin(here)

    def _position(self, caller: Caller) -> int:
        position = self.ledger.event_position
        return position.event_seq if position and position.bus_epoch == caller.epoch else 0

    async def _apply(self, events: Sequence[Event], caller: Caller) -> None:
        """Verdicts first: those that are given and not recorded are given again, the same, after a restart."""
        async with self._applying:
            if caller.epoch != self.bus.caller.epoch:
                return  # what they speak of is lost, or told to the new bus by the trainer
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
            self._settle(changes.ended)
        self._room.set()

    def _settle(self, ended: Sequence[Terminal]) -> None:
        trained: dict[int, list[GroupId]] = defaultdict(list)
        for terminal in ended:
            if terminal.state is TerminalState.TRAINED and terminal.step is not None:
                trained[terminal.step].append(terminal.group_id)
            elif terminal.state is TerminalState.FILTERED:
                self.admission.mark_filtered(terminal.group_id)
                self.retired.note(terminal.group_id, terminal.reason)
                self.reporter.count("groups_filtered")
            else:
                self.admission.mark_dropped(terminal.group_id, terminal.reason)
                self.reporter.count("groups_dropped")
        for step, groups in sorted(trained.items()):
            self.admission.step_committed(PolicyVersion(max(step, self.admission.version)), groups)
            self.step = max(step, self.step)
            self._stepped.set()
            self.reporter.count("groups_trained", len(groups))

    def _read(self, event: Event, changes: _Changes) -> None:
        group_id, samples = GroupId(event.group_id), event.samples
        match event.kind:
            case EventKind.COMPLETE:
                changes.verdicts.append(self._judge(event, group_id))
            case EventKind.TRAINED:
                assert event.step is not None
                version = PolicyVersion(event.step)
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

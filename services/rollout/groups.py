"""The life of prompt groups: admitted, judged when complete, trained or dropped; every change in the ledger first.

source ─▶ ledger.admit ─▶ bus.admit            a crash in between leaves an open group, attempted again
bus event ─▶ ledger.record ─▶ bus.judge        an event counts once: its position is in the same transaction
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
from bus.records import TRAINING, Event, EventKind, GroupAdmission, Verdict, VerdictKind
from relax.config.sections import RolloutArgs
from relax.control.admission import AdmissionState, Limits
from relax.control.judge import FilterStreak, Member, NoSignal, Outcome, judge_group
from relax.control.retired import RetiredPrompts
from relax.data.source import PromptSource
from relax.plugins import load_function
from relax.telemetry.time_split import WAIT_DATA, WORK
from relax.types import GroupId, PolicyVersion, Prompt, Purpose
from services.rollout.ledger import AdmissionEntry, EventPosition, Ledger, Terminal, TerminalState
from services.runtime import RoleReporter

logger = logging.getLogger("ray.serve")

LONG_POLL_S = 2.0
PUT_DEADLINE_S = 60.0
DROP_CHECK_S = 0.5


@dataclass(slots=True)
class _Changes:
    """What a batch of events asks for."""

    terminals: list[Terminal] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    trained: dict[int, list[GroupId]] = field(default_factory=lambda: defaultdict(list))


class GroupKeeper:
    """Owns ledger, source and admission; the only writer of all three."""

    def __init__(self, args: RolloutArgs, ledger: Ledger, source: PromptSource, bus: BusClient, reporter: RoleReporter):
        self.args, self.ledger, self.source, self.bus, self.reporter = args, ledger, source, bus, reporter
        counts = ledger.counts()
        self.admission = AdmissionState(
            Limits.from_run(args.run), trained=counts.trained, filtered=counts.filtered, dropped=counts.dropped
        )
        kind = args.rollout.filter.kind
        self.own_filter = load_function(kind, Path.cwd()) if ":" in kind else None
        self.streak = FilterStreak(source.name, args.rollout.filter)
        filtered = ledger.terminals(TerminalState.FILTERED)
        self.retired = RetiredPrompts(source.name, args.rollout.filter, [(t.group_id, t.reason) for t in filtered])
        self.next_seq = ledger.next_seq
        self.on_eval: Callable[[Event], None] = lambda event: None
        self.finished = asyncio.Event()
        self.step = 0
        """The newest committed training step."""
        self._stepped = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        cursor = ledger.last_cursor()
        if cursor is not None:
            source.load_state_dict(cursor)

    # ------------------------------------------------------------------ admission

    async def readmit_open(self) -> None:
        """After a restart: every open group gets its next attempt (its rows may be lost)."""
        entries = self.ledger.open_groups(Purpose.TRAIN)
        if not entries:
            return
        now = time.monotonic()
        for entry in entries:
            self.admission.admit(entry.group_id, now)
        renewed = await asyncio.to_thread(self.ledger.readmit, entries, self.admission.version)
        await self._put(renewed)
        self.reporter.count("groups_readmitted", len(renewed))

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
                await self.bus.close_topic(TRAINING)
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
            await self._put(entries)
            self.reporter.count("groups_admitted", len(entries))
        self.reporter.facts["skipped_rows"] = self.source.skipped

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
        epoch = self.bus.caller.epoch
        position = self.ledger.event_position
        after = position.event_seq if position and position.bus_epoch == epoch else 0
        while not self.reporter.stopped.is_set():
            with self.reporter.time_split.book(WAIT_DATA):
                events = await self.bus.events(after, wait_s=LONG_POLL_S)
            if not events:
                continue
            with self.reporter.time_split.book(WORK):
                await self._apply(events, EventPosition(epoch, events[-1].seq))
            after = events[-1].seq

    async def _apply(self, events: Sequence[Event], position: EventPosition) -> None:
        changes = _Changes()
        for event in events:
            if event.purpose is Purpose.EVAL:
                self.on_eval(event)
            else:
                self._read(event, changes)
        for step, groups in changes.trained.items():
            changes.terminals += [Terminal(group, TerminalState.TRAINED, step, PolicyVersion(step)) for group in groups]
        await asyncio.to_thread(self.ledger.record, changes.terminals, position)
        if changes.verdicts:
            await self.bus.judge(changes.verdicts)
        for step, groups in sorted(changes.trained.items()):
            self.admission.step_committed(PolicyVersion(max(step, self.admission.version)), groups)
            self.step = max(step, self.step)
            self._stepped.set()
            self.reporter.count("groups_trained", len(groups))
        for terminal in changes.terminals:
            if terminal.state is TerminalState.FILTERED:
                self.admission.mark_filtered(terminal.group_id)
                self.retired.note(terminal.group_id, terminal.reason)
                self.reporter.count("groups_filtered")
            elif terminal.state is TerminalState.DROPPED:
                self.admission.mark_dropped(terminal.group_id, terminal.reason)
                self.reporter.count("groups_dropped")
        self._room.set()

    def _read(self, event: Event, changes: _Changes) -> None:
        group_id = GroupId(event.group_id)
        if event.kind is EventKind.COMPLETE:
            self._judge(event, group_id, changes)
        elif event.kind is EventKind.TRAINED:
            assert event.step is not None
            changes.trained[event.step].append(group_id)
        elif event.kind is EventKind.STALE:
            changes.terminals.append(Terminal(group_id, TerminalState.DROPPED, reason="stale"))
        elif event.kind is EventKind.DEAD:
            self.reporter.count("dead_letters")
            if event.row_id is None:
                changes.terminals.append(Terminal(group_id, TerminalState.DROPPED, reason="dead_letter"))

    def _judge(self, event: Event, group_id: GroupId, changes: _Changes) -> None:
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
        changes.verdicts.append(Verdict(group_id, VerdictKind(verdict.outcome.value), verdict.reason))
        if verdict.outcome is not Outcome.ACCEPTED:
            changes.terminals.append(
                Terminal(group_id, TerminalState(verdict.outcome.value), reason=verdict.reason or verdict.detail)
            )

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
        """End groups untrained: in the ledger, in the bus, in the counts."""
        terminals = [Terminal(group, TerminalState.DROPPED, reason=reason) for group in groups]
        await asyncio.to_thread(self.ledger.record, terminals)
        await self.bus.judge([Verdict(group, VerdictKind.DROPPED, reason) for group in groups])
        for group in groups:
            self.admission.mark_dropped(group, reason)
        self.reporter.count("groups_dropped", len(groups))
        self._room.set()

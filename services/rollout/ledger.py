"""The ledger: which prompt groups were admitted and what became of each. The truth for accounting.

SQLite in write-ahead mode, append-only, one writing process (a lock file beside it), any number of readers.
`admit` commits before the prompt is put, so a crash in between leaves an open group, which is attempted
again; a terminal state is written once per (lineage, group), and with it, in the same transaction, the
position of the bus event that caused it, so that events count exactly once.

A lineage is one history of training. A rollback starts a new one that keeps what its parent had consumed,
apart from the groups trained after the restored step: those are open again.
"""

from __future__ import annotations

import enum
import fcntl
import json
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from relax.types import GroupId, Json, PolicyVersion, Purpose, RelaxError
from services.sqlite import connect, transaction

SCHEMA_VERSION = 3

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE lineages (
    lineage INTEGER PRIMARY KEY, parent INTEGER, through_step INTEGER NOT NULL, next_version INTEGER NOT NULL,
    published_step INTEGER NOT NULL
);
CREATE TABLE groups (
    group_id TEXT PRIMARY KEY, seq INTEGER NOT NULL UNIQUE, purpose TEXT NOT NULL, cursor TEXT, prompt TEXT
) WITHOUT ROWID;
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL REFERENCES groups, attempt INTEGER NOT NULL,
    min_version INTEGER NOT NULL, UNIQUE (group_id, attempt)
);
CREATE TABLE terminals (
    id INTEGER PRIMARY KEY AUTOINCREMENT, lineage INTEGER NOT NULL REFERENCES lineages,
    group_id TEXT NOT NULL REFERENCES groups, state TEXT NOT NULL, step INTEGER, version INTEGER, reason TEXT NOT NULL,
    samples TEXT NOT NULL,
    UNIQUE (lineage, group_id)
);
CREATE TABLE refused (
    id INTEGER PRIMARY KEY AUTOINCREMENT, lineage INTEGER NOT NULL, group_id TEXT NOT NULL, had TEXT NOT NULL,
    got TEXT NOT NULL
);
"""


class LedgerError(RelaxError):
    """A request that contradicts what the ledger holds, or a file that it cannot use."""


class LedgerBusy(LedgerError):
    """Another process writes this ledger."""


class LedgerSchemaError(LedgerError):
    """The file was written with another schema version."""


class TerminalState(enum.StrEnum):
    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class AdmissionEntry:
    """`seq` orders the groups of a run and stays with a group over its attempts, which count from 1.

    `cursor` is the source's state after this prompt; `prompt` is what a further attempt is made from.
    """

    seq: int
    group_id: GroupId
    attempt: int
    cursor: Json
    min_version: PolicyVersion
    purpose: Purpose = Purpose.TRAIN
    prompt: Json = None


@dataclass(frozen=True, slots=True)
class Terminal:
    """What became of a group: `trained` has step and version, the others a reason.

    `samples`: the group's produced samples by fate, as the bus counted them.
    """

    group_id: GroupId
    state: TerminalState
    step: int | None = None
    version: PolicyVersion | None = None
    reason: str = ""
    samples: Mapping[str, int] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Lineage:
    """One history of training. It went on from the state after `through_step`, when `published_step` was the newest
    step with published weights and `next_version` the first version that was free."""

    number: int
    through_step: int
    next_version: PolicyVersion
    published_step: int


@dataclass(frozen=True, slots=True)
class EventPosition:
    """The last bus event whose effects are in the ledger."""

    bus_epoch: str
    event_seq: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """`applied`: new; `repeated`: the same state was there; `refused`: another state was there first."""

    applied: tuple[GroupId, ...] = ()
    repeated: tuple[GroupId, ...] = ()
    refused: tuple[GroupId, ...] = ()
    already_processed: bool = False
    """The event position was not new: nothing was looked at."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Of the groups of one purpose, in the present lineage. admitted = trained + filtered + dropped + open."""

    admitted: int
    trained: int
    filtered: int
    dropped: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    """Second, different terminal states, over all purposes and lineages."""

    @property
    def open(self) -> int:
        return self.admitted - self.trained - self.filtered - self.dropped.total()


class Ledger:
    """Thread-safe. `Ledger(path)` opens for writing and creates; `Ledger(path, read_only=True)` only reads.

    Raises `LedgerBusy`, `LedgerSchemaError`, `LedgerError`.
    """

    def __init__(self, path: Path, *, read_only: bool = False):
        self.path = path
        self._mutex = threading.RLock()
        self._lock_fd = None if read_only else _lock(path)
        try:
            self._db = _open(path, read_only)
            if not read_only:
                self._create()
            self._check_schema()
        except BaseException:
            self._unlock()
            raise

    def close(self) -> None:
        with self._mutex:
            self._db.close()
            self._unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def admit(self, entries: Sequence[AdmissionEntry]) -> None:
        """Commit admissions, all or none, before their prompts are put.

        Raises `LedgerError` for a group or seq that is taken, an attempt that is not the next one, or a new
        attempt at a terminal group.
        """
        with self._transaction():
            for entry in entries:
                if entry.attempt == 1:
                    self._insert_group(entry)
                else:
                    self._check_next_attempt(entry)
                self._insert_attempt(entry.group_id, entry.attempt, entry.min_version)

    def readmit(self, groups: Sequence[AdmissionEntry], min_version: PolicyVersion) -> list[AdmissionEntry]:
        """Commit the next attempt of open groups (as `open_groups` gave them); return the new entries."""
        entries = [
            AdmissionEntry(g.seq, g.group_id, g.attempt + 1, g.cursor, min_version, g.purpose, g.prompt) for g in groups
        ]
        self.admit(entries)
        return entries

    def record(self, terminals: Iterable[Terminal], position: EventPosition | None = None) -> Recorded:
        """Write terminal states and the event position in one transaction. First write wins.

        With a position at or before the stored one of the same bus epoch nothing happens. A second different
        state of a group in this lineage is refused and counted. Raises `LedgerError` for an unknown group.
        """
        applied, repeated, refused = list[GroupId](), list[GroupId](), list[GroupId]()
        with self._transaction():
            if position is not None and not self._advance(position):
                return Recorded(already_processed=True)
            for terminal in terminals:
                had = self._terminal(terminal.group_id)
                if had is None:
                    self._insert_terminal(terminal)
                    applied.append(terminal.group_id)
                elif had == terminal:
                    repeated.append(terminal.group_id)
                else:
                    self._insert_refused(had, terminal)
                    refused.append(terminal.group_id)
        return Recorded(tuple(applied), tuple(repeated), tuple(refused))

    def open_groups(self, purpose: Purpose | None = None) -> list[AdmissionEntry]:
        """Admitted and not terminal in this lineage, with their last attempt, in the order of seq."""
        rows = self._all(
            """SELECT g.seq, g.group_id, a.attempt, g.cursor, a.min_version, g.purpose, g.prompt
               FROM groups g JOIN attempts a ON a.group_id = g.group_id
               WHERE a.attempt = (SELECT MAX(attempt) FROM attempts WHERE group_id = g.group_id)
                 AND NOT EXISTS (SELECT 1 FROM terminals t WHERE t.group_id = g.group_id AND t.lineage = ?)
                 AND (? IS NULL OR g.purpose = ?) ORDER BY g.seq""",
            (self.lineage, purpose, purpose),
        )
        return [
            AdmissionEntry(
                seq, GroupId(gid), attempt, _load(cursor), PolicyVersion(version), Purpose(why), _load(prompt)
            )
            for seq, gid, attempt, cursor, version, why, prompt in rows
        ]

    def counts(self, purpose: Purpose = Purpose.TRAIN) -> Counts:
        with self._mutex:
            admitted = self._one("SELECT COUNT(*) FROM groups WHERE purpose = ?", (purpose,))[0]
            by_state: Counter[str] = Counter()
            dropped: Counter[str] = Counter()
            for state, reason, count in self._all(
                """SELECT t.state, t.reason, COUNT(*) FROM terminals t JOIN groups g ON g.group_id = t.group_id
                   WHERE t.lineage = ? AND g.purpose = ? GROUP BY t.state, t.reason""",
                (self.lineage, purpose),
            ):
                by_state[state] += count
                if state == TerminalState.DROPPED:
                    dropped[reason] += count
            refused = self._one("SELECT COUNT(*) FROM refused")[0]
        return Counts(admitted, by_state[TerminalState.TRAINED], by_state[TerminalState.FILTERED], dropped, refused)

    def sample_fates(self) -> Counter[str]:
        """Train samples of ended groups by fate, in this lineage: what a new bus is told of those before it."""
        fates: Counter[str] = Counter()
        for (text,) in self._all("SELECT samples FROM terminals WHERE lineage = ?", (self.lineage,)):
            fates.update(json.loads(text))
        return fates

    @property
    def trained_through(self) -> int:
        """The newest step with a trained group in this lineage; 0 before the first."""
        return int(self._one("SELECT COALESCE(MAX(step), 0) FROM terminals WHERE lineage = ?", (self.lineage,))[0])

    @property
    def newest_version(self) -> PolicyVersion:
        """The newest version that a step published, or a group was admitted for, in any lineage; 0 before the first."""
        row = self._one(
            """SELECT MAX(COALESCE((SELECT MAX(version) FROM terminals), 0),
                          COALESCE((SELECT MAX(min_version) FROM attempts), 0))"""
        )
        return PolicyVersion(int(row[0]))

    def terminal(self, group_id: GroupId) -> Terminal | None:
        """What became of a group in this lineage; None while it is open (or unknown)."""
        with self._mutex:
            return self._terminal(group_id)

    def terminals(self, state: TerminalState | None = None) -> list[Terminal]:
        """All of this lineage, in the order in which they were written."""
        rows = self._all(
            """SELECT group_id, state, step, version, reason, samples FROM terminals
               WHERE lineage = ? AND (? IS NULL OR state = ?) ORDER BY id""",
            (self.lineage, state, state),
        )
        return [_terminal_from(row) for row in rows]

    def last_cursor(self) -> Json:
        """The source's state after the last admitted training group; None before the first."""
        row = self._one_or_none(
            "SELECT cursor FROM groups WHERE purpose = ? ORDER BY seq DESC LIMIT 1", (Purpose.TRAIN,)
        )
        return None if row is None else _load(row[0])

    @property
    def next_seq(self) -> int:
        return int(self._one("SELECT COALESCE(MAX(seq) + 1, 0) FROM groups")[0])

    @property
    def lineage(self) -> int:
        return int(self._one("SELECT MAX(lineage) FROM lineages")[0])

    def newest_lineage(self) -> Lineage:
        number, through, version, published = self._one(
            "SELECT lineage, through_step, next_version, published_step FROM lineages ORDER BY lineage DESC LIMIT 1"
        )
        return Lineage(number, through, PolicyVersion(version), published)

    def taken_back(self) -> tuple[GroupId, ...]:
        """Groups that the lineage before had trained, and this one did not keep, in the order they were trained."""
        rows = self._all(
            """SELECT t.group_id FROM terminals t JOIN lineages l ON l.lineage = ? AND t.lineage = l.parent
               WHERE t.state = ? AND t.step > l.through_step ORDER BY t.id""",
            (self.lineage, TerminalState.TRAINED),
        )
        return tuple(GroupId(group_id) for (group_id,) in rows)

    @property
    def event_position(self) -> EventPosition | None:
        row = self._one_or_none("SELECT value FROM meta WHERE key = 'event_position'")
        return None if row is None else EventPosition(**json.loads(row[0]))

    def start_lineage(self, through_step: int, next_version: PolicyVersion, published_step: int) -> int:
        """Begin a new lineage after a rollback to the state after `through_step`; return its number. See `Lineage`.

        It keeps the filtered and dropped groups and those trained at or before that step. The ones trained
        later are open again.
        """
        with self._transaction():
            parent = self.lineage
            self._db.execute(
                "INSERT INTO lineages VALUES (?, ?, ?, ?, ?)",
                (parent + 1, parent, through_step, next_version, published_step),
            )
            self._db.execute(
                """INSERT INTO terminals (lineage, group_id, state, step, version, reason, samples)
                   SELECT ?, group_id, state, step, version, reason, samples FROM terminals
                   WHERE lineage = ? AND (state != ? OR step <= ?) ORDER BY id""",
                (parent + 1, parent, TerminalState.TRAINED, through_step),
            )
        return parent + 1

    def position(self) -> dict[str, Json]:
        """What a checkpoint records of the ledger: lineage, last seq, and the ids of the last rows."""
        with self._mutex:
            return {
                "lineage": self.lineage,
                "next_seq": self.next_seq,
                "last_attempt_id": self._one("SELECT COALESCE(MAX(id), 0) FROM attempts")[0],
                "last_terminal_id": self._one("SELECT COALESCE(MAX(id), 0) FROM terminals")[0],
            }

    def _create(self) -> None:
        with self._transaction():
            if self._one("SELECT COUNT(*) FROM sqlite_master")[0]:
                return
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
            self._db.execute("INSERT INTO lineages VALUES (0, NULL, 0, 0, 0)")

    def _check_schema(self) -> None:
        try:
            row = self._one_or_none("SELECT value FROM meta WHERE key = 'schema_version'")
        except sqlite3.DatabaseError as error:
            raise LedgerSchemaError(f"{self.path} is not a ledger: {error}") from error
        if row is None or row[0] != str(SCHEMA_VERSION):
            raise LedgerSchemaError(
                f"{self.path} has schema version {row[0] if row else 'unknown'}, this program needs {SCHEMA_VERSION}; "
                f"continue the run with the program that began it, or start a new run folder"
            )

    def _insert_group(self, entry: AdmissionEntry) -> None:
        try:
            self._db.execute(
                "INSERT INTO groups VALUES (?, ?, ?, ?, ?)",
                (entry.group_id, entry.seq, entry.purpose, json.dumps(entry.cursor), json.dumps(entry.prompt)),
            )
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"group {entry.group_id} (seq {entry.seq}) was admitted before: {error}") from error

    def _check_next_attempt(self, entry: AdmissionEntry) -> None:
        last = self._one("SELECT MAX(attempt) FROM attempts WHERE group_id = ?", (entry.group_id,))[0]
        if last is None or entry.attempt != last + 1:
            raise LedgerError(f"attempt {entry.attempt} at group {entry.group_id} does not follow attempt {last}")
        if (had := self._terminal(entry.group_id)) is not None:
            raise LedgerError(f"group {entry.group_id} is {had.state} already: no further attempt")

    def _insert_attempt(self, group_id: GroupId, attempt: int, min_version: PolicyVersion) -> None:
        self._db.execute(
            "INSERT INTO attempts (group_id, attempt, min_version) VALUES (?, ?, ?)", (group_id, attempt, min_version)
        )

    def _advance(self, position: EventPosition) -> bool:
        stored = self.event_position
        if stored and stored.bus_epoch == position.bus_epoch and position.event_seq <= stored.event_seq:
            return False
        value = json.dumps({"bus_epoch": position.bus_epoch, "event_seq": position.event_seq})
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('event_position', ?)", (value,))
        return True

    def _terminal(self, group_id: GroupId) -> Terminal | None:
        row = self._one_or_none(
            "SELECT group_id, state, step, version, reason, samples FROM terminals WHERE lineage = ? AND group_id = ?",
            (self.lineage, group_id),
        )
        return None if row is None else _terminal_from(row)

    def _insert_terminal(self, terminal: Terminal) -> None:
        try:
            self._db.execute(
                """INSERT INTO terminals (lineage, group_id, state, step, version, reason, samples)
                   VALUES (?, ?, ?, ?, ?, ?, ?)""",
                (
                    self.lineage,
                    terminal.group_id,
                    terminal.state,
                    terminal.step,
                    terminal.version,
                    terminal.reason,
                    json.dumps(dict(terminal.samples)),
                ),
            )
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"group {terminal.group_id} was never admitted: {error}") from error

    def _insert_refused(self, had: Terminal, got: Terminal) -> None:
        self._db.execute(
            "INSERT INTO refused (lineage, group_id, had, got) VALUES (?, ?, ?, ?)",
            (self.lineage, got.group_id, _describe(had), _describe(got)),
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._mutex:
            if self._lock_fd is None:
                raise LedgerError(f"{self.path} is open for reading only, or closed")
            with transaction(self._db):
                yield

    def _all(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Json, ...]]:
        with self._mutex:
            return self._db.execute(sql, parameters).fetchall()

    def _one(self, sql: str, parameters: Sequence[object] = ()) -> tuple[Json, ...]:
        return self._all(sql, parameters)[0]

    def _one_or_none(self, sql: str, parameters: Sequence[object] = ()) -> tuple[Json, ...] | None:
        rows = self._all(sql, parameters)
        return rows[0] if rows else None

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _lock(path: Path) -> int:
    # On a file of its own: SQLite's locks on the database are dropped when any of its descriptors closes.
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise LedgerBusy(f"another process writes {path}; one manager at a time") from error
    return fd


def _open(path: Path, read_only: bool) -> sqlite3.Connection:
    try:
        return connect(path, read_only=read_only)
    except sqlite3.DatabaseError as error:
        raise LedgerError(f"cannot open the ledger {path}: {error}") from error


def _terminal_from(row: tuple[Json, ...]) -> Terminal:
    group_id, state, step, version, reason, samples = row
    return Terminal(
        GroupId(group_id),
        TerminalState(state),
        step,
        None if version is None else PolicyVersion(version),
        reason,
        json.loads(samples),
    )


def _describe(terminal: Terminal) -> str:
    return f"{terminal.state} step={terminal.step} version={terminal.version} reason={terminal.reason}"


def _load(text: str | None) -> Json:
    return None if text is None else json.loads(text)

"""The controller's durable state: SQLite in write-ahead mode, one writing process.

| table | what |
|---|---|
| meta | schema version |
| state | phase of the run, wanted instances, totals of the account, by key, as JSON |
| replicas | one row per role and instance: process, node, incarnation, and its account |
| operations, incidents | the log; an operation may have the idempotency key of its request |

What the ledger, metrics.jsonl and the bus hold is not repeated here.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.control.operations import Incident, Operation
from relax.types import Json, RelaxError
from services.sqlite import connect, transaction

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE replicas (
    instance TEXT PRIMARY KEY, role TEXT NOT NULL, replica_id TEXT NOT NULL, pid INTEGER NOT NULL,
    started_s REAL NOT NULL, node TEXT NOT NULL, restarts INTEGER NOT NULL, account TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE operations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, idempotency_key TEXT UNIQUE, body TEXT NOT NULL
);
CREATE TABLE incidents (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, body TEXT NOT NULL);
"""


class StoreError(RelaxError):
    """The controller's state cannot be used; says which file and what to do."""


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One row of `replicas`. `account`: what the book adds up over its restarts."""

    instance: str
    role: str
    replica_id: str
    pid: int
    started_s: float
    node: str
    restarts: int
    account: Mapping[str, Json]


class Store:
    """Every method is one transaction, on disk when it returns, from any thread."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file. Raises `StoreError` for one of another schema, or that is no such file."""
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = connect(path)
            self._open_schema()
        except (sqlite3.DatabaseError, OSError) as error:
            raise StoreError(
                f"{path} cannot be used as the controller's state ({error}): "
                "give another controller.recovery.state_path"
            ) from error

    def _open_schema(self) -> None:
        with self._transaction():
            if not self._db.execute("SELECT 1 FROM sqlite_master").fetchall():
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
            found = self._db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        if found is None or found[0] != str(SCHEMA_VERSION):
            had = "none" if found is None else found[0]
            raise StoreError(
                f"{self.path} has schema version {had}, this program writes {SCHEMA_VERSION}: go on with the program "
                "that wrote it, or move the file away (what it says of restarts and operations is lost then)"
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, transaction(self._db):
            yield

    # ------------------------------------------------------------------ state

    def get(self, key: str) -> Any:
        """None where nothing was set."""
        with self._lock:
            found = self._db.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
        return None if found is None else json.loads(found[0])

    def set(self, **values: Json) -> None:
        with self._transaction():
            self._set(values)

    def save(self, replicas: Sequence[ReplicaRow], values: Mapping[str, Json]) -> None:
        """All replicas, and some of the state, together."""
        rows = [
            (row.instance, row.role, row.replica_id, row.pid, row.started_s, row.node, row.restarts, _text(row.account))
            for row in replicas
        ]
        with self._transaction():
            self._db.execute("DELETE FROM replicas")
            self._db.executemany("INSERT INTO replicas VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
            self._set(values)

    def _set(self, values: Mapping[str, Json]) -> None:
        self._db.executemany(
            "INSERT INTO state VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            [(key, _text(value)) for key, value in values.items()],
        )

    def replicas(self) -> list[ReplicaRow]:
        with self._lock:
            rows = self._db.execute("SELECT * FROM replicas").fetchall()
        return [ReplicaRow(*facts, account=json.loads(account)) for *facts, account in rows]  # type: ignore[misc]

    def begin_life(self, **values: Json) -> None:
        """The run begins on another cluster: its processes are other ones. The log stays."""
        with self._transaction():
            self._db.execute("DELETE FROM replicas")
            self._db.execute("DELETE FROM state")
            self._set(values)

    # ------------------------------------------------------------------ the log

    def put_operation(self, operation: Operation, idempotency_key: str | None = None) -> None:
        """A new one, or the next state of one that is there. Raises `StoreError` for a key that is taken."""
        body = _text(operation.to_json())
        try:
            with self._transaction():
                self._db.execute(
                    "INSERT INTO operations (id, idempotency_key, body) VALUES (?, ?, ?) "
                    "ON CONFLICT (id) DO UPDATE SET body = excluded.body",
                    (operation.id, idempotency_key, body),
                )
        except sqlite3.IntegrityError as error:
            raise StoreError(f"the idempotency key {idempotency_key!r} belongs to another operation") from error

    def operation_of_key(self, key: str) -> Operation | None:
        with self._lock:
            found = self._db.execute("SELECT body FROM operations WHERE idempotency_key = ?", (key,)).fetchone()
        return None if found is None else Operation.from_json(json.loads(found[0]))

    def operations(self) -> list[Operation]:
        """The oldest first."""
        with self._lock:
            rows = self._db.execute("SELECT body FROM operations ORDER BY seq").fetchall()
        return [Operation.from_json(json.loads(body)) for (body,) in rows]

    def put_incident(self, incident: Incident) -> None:
        with self._transaction():
            self._db.execute(
                "INSERT INTO incidents (id, body) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET body = excluded.body",
                (incident.id, _text(incident.to_json())),
            )

    def incidents(self) -> list[Incident]:
        """The oldest first."""
        with self._lock:
            rows = self._db.execute("SELECT body FROM incidents ORDER BY seq").fetchall()
        return [Incident.from_json(json.loads(body)) for (body,) in rows]

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _text(value: Any) -> str:
    return json.dumps(value)

"""The ledger: exact accounting over crashes, repeats and rollbacks."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from relax.types import GroupId, PolicyVersion, Purpose
from services.rollout.ledger import (
    AdmissionEntry,
    EventPosition,
    Ledger,
    LedgerBusy,
    LedgerError,
    LedgerSchemaError,
    Lineage,
    Terminal,
    TerminalState,
)


def gid(number: int) -> GroupId:
    return GroupId(f"toy:0:{number}")


def entry(number: int, attempt: int = 1, version: int = 0, purpose: Purpose = Purpose.TRAIN) -> AdmissionEntry:
    prompt = {"text": f"p{number}"}
    return AdmissionEntry(number, gid(number), attempt, {"index": number + 1}, PolicyVersion(version), purpose, prompt)


def trained(number: int, step: int = 1) -> Terminal:
    return Terminal(gid(number), TerminalState.TRAINED, step, PolicyVersion(step))


def dropped(number: int, reason: str = "deadline") -> Terminal:
    return Terminal(gid(number), TerminalState.DROPPED, reason=reason)


def filtered(number: int) -> Terminal:
    return Terminal(gid(number), TerminalState.FILTERED, reason="accuracy_low")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.sqlite"


def test_admissions_outlive_the_process_with_cursor_and_prompt(path: Path) -> None:
    """behaviour: B12"""
    with Ledger(path) as ledger:
        ledger.admit([entry(0), entry(1, version=3)])
    with Ledger(path) as ledger:
        assert ledger.open_groups() == [entry(0), entry(1, version=3)]
        assert (ledger.last_cursor(), ledger.next_seq) == ({"index": 2}, 2)


def test_a_killed_writer_loses_no_committed_admission_and_leaves_no_half_batch(path: Path) -> None:
    """behaviour: B12"""
    code = f"""
import os, signal
from pathlib import Path
from relax.types import GroupId, PolicyVersion
from services.rollout.ledger import AdmissionEntry, Ledger
def entry(n): return AdmissionEntry(n, GroupId(f"toy:0:{{n}}"), 1, {{"index": n + 1}}, PolicyVersion(0))
def batch():
    yield entry(2)
    os.kill(os.getpid(), signal.SIGKILL)
ledger = Ledger(Path({str(path)!r}))
ledger.admit([entry(0), entry(1)])
ledger.admit(batch())
"""
    killed = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with Ledger(path) as ledger:
        assert [group.group_id for group in ledger.open_groups()] == [gid(0), gid(1)]
        assert ledger.last_cursor() == {"index": 2}


def test_nothing_is_admitted_unless_the_whole_batch_is(path: Path) -> None:
    """behaviour: B12"""
    with Ledger(path) as ledger:
        ledger.admit([entry(0)])
        with pytest.raises(LedgerError, match=r"toy:0:0 \(seq 0\) was admitted before"):
            ledger.admit([entry(1), entry(0)])
        assert [group.group_id for group in ledger.open_groups()] == [gid(0)]


def test_counts_add_up(path: Path) -> None:
    """behaviour: B16"""
    with Ledger(path) as ledger:
        ledger.admit([entry(number) for number in range(6)] + [entry(9, purpose=Purpose.EVAL)])
        ledger.record([trained(0), filtered(1), dropped(2), dropped(3, "stale")])
        counts = ledger.counts()
        assert (counts.admitted, counts.trained, counts.filtered, counts.open) == (6, 1, 1, 2)
        assert counts.dropped == Counter(deadline=1, stale=1)
        assert ledger.counts(Purpose.EVAL).open == 1
        assert [group.seq for group in ledger.open_groups()] == [4, 5, 9]
        assert [group.seq for group in ledger.open_groups(Purpose.TRAIN)] == [4, 5]
        assert ledger.last_cursor() == {"index": 6}, "evaluation does not move the training cursor"


def test_a_repeated_terminal_state_changes_nothing_and_another_one_is_refused_and_counted(path: Path) -> None:
    """behaviour: B16"""
    with Ledger(path) as ledger:
        ledger.admit([entry(0), entry(1)])
        assert ledger.record([trained(0)]).applied == (gid(0),)
        again = ledger.record([trained(0), dropped(0), trained(0, step=2), dropped(1)])
        assert (again.applied, again.repeated, again.refused) == ((gid(1),), (gid(0),), (gid(0), gid(0)))
        assert ledger.terminal(gid(0)) == trained(0)
        counts = ledger.counts()
        assert (counts.trained, counts.dropped.total(), counts.refused) == (1, 1, 2)


def test_a_terminal_state_of_an_unknown_group_is_an_error(path: Path) -> None:
    with Ledger(path) as ledger, pytest.raises(LedgerError, match="never admitted"):
        ledger.record([trained(0)])


def test_an_event_is_applied_exactly_once_and_its_position_goes_with_its_effects(path: Path) -> None:
    """behaviour: B12"""
    with Ledger(path) as ledger:
        ledger.admit([entry(number) for number in range(3)])
        assert ledger.event_position is None
        ledger.record([trained(0)], EventPosition("a", 7))
        assert ledger.record([trained(1)], EventPosition("a", 7)).already_processed
        with pytest.raises(LedgerError):
            ledger.record([trained(1), trained(99)], EventPosition("a", 8))
    with Ledger(path) as ledger:
        assert ledger.event_position == EventPosition("a", 7)
        assert ledger.counts().trained == 1
        assert ledger.record([trained(1)], EventPosition("b", 1)).applied == (gid(1),), "a new bus counts anew"
        assert ledger.event_position == EventPosition("b", 1)


def test_a_further_attempt_keeps_seq_and_prompt_and_follows_the_last_one(path: Path) -> None:
    """behaviour: B12"""
    with Ledger(path) as ledger:
        ledger.admit([entry(0), entry(1)])
        assert ledger.readmit(ledger.open_groups(), PolicyVersion(4)) == [entry(0, 2, 4), entry(1, 2, 4)]
        assert ledger.open_groups() == [entry(0, 2, 4), entry(1, 2, 4)]
        assert ledger.counts().admitted == 2
        with pytest.raises(LedgerError, match=r"attempt 2 .* does not follow attempt 2"):
            ledger.admit([entry(0, attempt=2)])
        ledger.record([trained(0)])
        with pytest.raises(LedgerError, match="trained already"):
            ledger.admit([entry(0, attempt=3)])


def test_a_rollback_reopens_exactly_the_groups_trained_after_the_restored_step(path: Path) -> None:
    """behaviour: B12"""
    with Ledger(path) as ledger:
        ledger.admit([entry(number) for number in range(6)])
        ledger.record([trained(0, 1), trained(1, 2), trained(2, 3), filtered(3), dropped(4)])
        assert ledger.start_lineage(2, PolicyVersion(4), 3) == 1
        assert ledger.newest_lineage() == Lineage(1, 2, PolicyVersion(4), 3)
        assert ledger.taken_back() == (gid(2),)
        assert ledger.trained_through == 2
        assert [group.group_id for group in ledger.open_groups()] == [gid(2), gid(5)]
        counts = ledger.counts()
        assert (counts.admitted, counts.trained, counts.filtered, counts.dropped.total()) == (6, 2, 1, 1)
        assert ledger.record([trained(2, 3)]).applied == (gid(2),), "once in each lineage"
        assert [terminal.group_id for terminal in ledger.terminals(TerminalState.TRAINED)] == [gid(0), gid(1), gid(2)]
    with Ledger(path) as ledger:
        assert ledger.position() == {"lineage": 1, "next_seq": 6, "last_attempt_id": 6, "last_terminal_id": 10}


def test_versions_only_grow_over_a_rollback_and_over_readmissions(path: Path) -> None:
    """behaviour: B10"""
    with Ledger(path) as ledger:
        assert (ledger.newest_version, ledger.newest_lineage().number, ledger.taken_back()) == (0, 0, ())
        ledger.admit([entry(0), entry(1)])
        ledger.record([trained(0, 1), trained(1, 7)])
        ledger.start_lineage(0, PolicyVersion(8), 7)
        assert ledger.newest_version == 7, "of the lineage before"
        assert ledger.taken_back() == (gid(0), gid(1)), "in the order in which they were trained"
        ledger.readmit(ledger.open_groups(), PolicyVersion(8))
        assert ledger.newest_version == 8


def test_one_process_writes_and_others_read(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.admit([entry(0)])
        with pytest.raises(LedgerBusy, match="another process writes"):
            Ledger(path)
        with Ledger(path, read_only=True) as reader:
            assert reader.counts().admitted == 1
            ledger.admit([entry(1)])
            assert reader.counts().admitted == 2
            with pytest.raises(LedgerError, match="reading only"):
                reader.admit([entry(2)])
    with Ledger(path) as ledger:
        assert ledger.counts().admitted == 2


def test_another_schema_version_is_refused_and_says_what_to_do(path: Path) -> None:
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    db.close()
    with pytest.raises(LedgerSchemaError, match=r"schema version 99, this program needs 3; .*new run folder"):
        Ledger(path)


@pytest.mark.parametrize(
    "content", [b"not a database, not at all, nothing like it" * 40, None], ids=["garbage", "other"]
)
def test_a_file_that_is_no_ledger_is_refused_and_left_alone(path: Path, content: bytes | None) -> None:
    path.parent.mkdir(parents=True)
    if content is None:
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE mine (x)")
        db.close()
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(LedgerError):
        Ledger(path)
    if content is not None:
        assert path.read_bytes() == before
    else:
        with sqlite3.connect(path) as db:
            assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]
        db.close()


def test_the_writer_flushes_to_disk_at_each_commit(path: Path) -> None:
    """behaviour: B12"""
    with Ledger(path) as ledger:
        assert ledger._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert ledger._db.execute("PRAGMA synchronous").fetchone() == (2,)

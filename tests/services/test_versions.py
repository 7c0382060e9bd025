"""The table of published versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax.types import PolicyVersion
from relax.weights.manifest import CorruptWeights
from services.dcs.versions import FILE, VersionLine, VersionTable, read_versions


def line(version: int, step: int) -> VersionLine:
    return VersionLine(PolicyVersion(version), step, "digest")


def test_versions_go_on_above_the_highest_that_was_ever_published(tmp_path: Path) -> None:
    """behaviour: B10"""
    table = VersionTable(tmp_path)
    assert table.newest is None
    for published in (line(0, 0), line(1, 1), line(2, 0)):
        table.add(published)
    assert table.newest == line(2, 0)
    again = VersionTable(tmp_path)
    assert (again.newest, again.lines) == (line(2, 0), [line(0, 0), line(1, 1), line(2, 0)])


def test_a_line_that_a_crash_tore_is_passed_over(tmp_path: Path) -> None:
    table = VersionTable(tmp_path)
    table.add(line(0, 0))
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"version": 1, "st')
    table = VersionTable(tmp_path)
    table.add(line(1, 1))
    assert read_versions(tmp_path / FILE) == [line(0, 0), line(1, 1)]


def test_a_version_comes_again_only_with_the_same_weights(tmp_path: Path) -> None:
    """behaviour: B10"""
    table = VersionTable(tmp_path)
    table.add(line(3, 3))
    table.add(line(3, 3))
    with pytest.raises(CorruptWeights, match="version 3 was published before, with other weights"):
        table.add(VersionLine(PolicyVersion(3), 3, "other"))
    assert table.lines == read_versions(tmp_path / FILE) == [line(3, 3)]

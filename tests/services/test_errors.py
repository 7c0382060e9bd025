"""Errors that cross a process border arrive as what they are."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from bus.errors import LeaseLost
from relax.config.file import ConfigError
from relax.data.rows import BadRow
from relax.types import RelaxError
from relax.weights.space import NoSpace

ERRORS = [
    NoSpace("a checkpoint", Path("/x"), 10, 5, 1, "free some"),
    ConfigError(["first", "second"]),
    BadRow("over_long", "row 3 is too long"),
    LeaseLost("lease 1 has expired"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_to_another_process(error: RelaxError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)

from __future__ import annotations

import pytest

from relax.config.roles import TeacherRouting
from relax.rollout.routing import teacher_of
from relax.types import DataError, Prompt


def test_the_source_names_the_teacher_and_the_default_takes_the_rest() -> None:
    routing = TeacherRouting(routes={"sums": "math"}, default="general")
    assert teacher_of(Prompt("sums", 0, 1, text="1+1"), routing) == "math"
    assert teacher_of(Prompt("poems", 0, 1, text="rose"), routing) == "general"


def test_a_key_of_the_metadata_names_the_teacher() -> None:
    routing = TeacherRouting(by="task", routes={"algebra": "math"})
    assert teacher_of(Prompt("mix", 0, 1, text="x", metadata={"task": "algebra"}), routing) == "math"
    with pytest.raises(DataError, match="names no teacher for"):
        teacher_of(Prompt("mix", 0, 1, text="x", metadata={"task": "poems"}), routing)

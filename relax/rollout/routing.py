"""Which teacher scores a sample. Pure."""

from __future__ import annotations

from relax.config.roles import TeacherRouting
from relax.types import DataError, Prompt


def teacher_of(prompt: Prompt, routing: TeacherRouting) -> str:
    """Name of the teacher: by the prompt's source or a key of its metadata, else the default.

    Raises `DataError` for a prompt that nothing names a teacher for.
    """
    value = prompt.source if routing.by == "source" else prompt.metadata.get(routing.by)
    name = routing.routes.get(str(value), routing.default)
    if name is None:
        raise DataError(
            f"prompt {prompt.group_id} has {routing.by} {value!r}, which rollout.teachers.routes names no teacher for: "
            "add a route, or a default"
        )
    return name

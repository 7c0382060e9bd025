"""A finished sample as the bus takes it."""

from __future__ import annotations

from bus.records import GroupInfo, RowPut
from relax.types import Trajectory, make_row_id


def row_put(
    group: GroupInfo,
    k: int,
    trajectory: Trajectory,
    *,
    segment: int = 0,
    segments: int = 1,
    teacher: str | None = None,
) -> RowPut:
    """Segment `segment` of `segments`. `teacher`: who scores it. Tags are there before the row is visible."""
    return RowPut(
        make_row_id(group.group_id, k, segment),  # type: ignore[arg-type]
        group.group_id,
        {
            "tokens": trajectory.tokens,
            "loss_mask": trajectory.loss_mask,
            "rollout_logprobs": trajectory.rollout_logprobs,
            "versions": trajectory.versions,
            "sampling": trajectory.sampling.to_json(),
            "finish_reason": trajectory.finish_reason.value,
            "metadata": trajectory.metadata,
        },
        {"purpose": group.purpose, "segments": segments, **({} if teacher is None else {"teacher": teacher})},
    )

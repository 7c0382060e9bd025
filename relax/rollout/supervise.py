"""The border around a user's worker: an attempt that fails is tried again, then reported."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from relax.rollout.base import RolloutWorker
from relax.types import DataItem, MalformedTrajectory, Trajectory

FAILED_ATTEMPTS = "failed_attempts"
"""Key in a trajectory's metadata: how many attempts failed before this one; absent when none did."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """No attempt gave a sample. `reason` is the last error in words, `attempts` how many were made."""

    reason: str
    attempts: int


async def run_with_retries(
    worker: RolloutWorker, item: DataItem, retries: int, *, max_tokens: int | None = None, max_segments: int = 1
) -> list[Trajectory] | Failure:
    """The segments of one sample (nearly always one) by at most `retries + 1` attempts (B39).

    An attempt fails when `step` raises, or returns something else than valid trajectories, at most
    `max_segments` of at most `max_tokens` tokens each: the bus has reserved no room for more. Cancellation
    passes through.
    """
    reason = ""
    for attempt in range(retries + 1):
        try:
            segments = _checked(await worker.step(item), max_tokens, max_segments)
        except Exception as error:
            # The one border of a user's worker: whatever it raises is a failed attempt, logged and counted.
            reason = f"{type(error).__name__}: {error}"
            log.warning("sample %s, attempt %d of %d failed", item.sample_id, attempt + 1, retries + 1, exc_info=True)
        else:
            if attempt > 0:
                segments[0].metadata[FAILED_ATTEMPTS] = attempt
            return segments
    return Failure(reason, retries + 1)


def _checked(result: object, max_tokens: int | None, max_segments: int) -> list[Trajectory]:
    given = result if isinstance(result, list) else [result]
    segments = [segment for segment in given if isinstance(segment, Trajectory)]
    if not segments or len(segments) != len(given):
        raise MalformedTrajectory(f"step returned {type(result).__name__}, a Trajectory or a list of them is needed")
    if len(segments) > max_segments:
        raise MalformedTrajectory(
            f"the trajectory was split into {len(segments)} segments, rollout.max_segments allows {max_segments}"
        )
    for segment in segments:
        segment.validate()
        if max_tokens is not None and len(segment.tokens) > max_tokens:
            raise MalformedTrajectory(f"the trajectory has {len(segment.tokens)} tokens, the run allows {max_tokens}")
    return segments

"""What went wrong and was dealt with, counted by kind. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from services import names

OWN_KINDS = ("stall", "role_lost", "role_failed", "metric_refused", "tracker_failed")
"""Seen by the controller itself."""

_ENGINES = frozenset({names.INSTANCE, names.EVALUATOR})

ROLE_KINDS: Mapping[str, tuple[str, frozenset[str] | None]] = MappingProxyType(
    {
        "heartbeat_lost": ("heartbeats_lost", None),
        "update_skipped": ("updates_skipped", frozenset({names.ACTOR})),
        "commit_repeated": ("commits_repeated", frozenset({names.ACTOR})),
        "constant_reward": ("constant_reward_steps", frozenset({names.ACTOR})),
        "checkpoint_failed": ("checkpoints_failed", frozenset({names.ACTOR})),
        "publication_refused": ("publications_refused", frozenset({names.DCS})),
        "adoption_failed": ("adoptions_failed", _ENGINES),
        "sample_failed": ("samples_failed", _ENGINES),
        "lease_lost": ("leases_lost", _ENGINES),
        "instance_failed": ("instances_failed", frozenset({names.ROLLOUT})),
        "dead_letter": ("dead_letters", frozenset({names.ROLLOUT})),
    }
)
"""Kind -> the counter of the replicas' heartbeats, and the roles that may have it (None: all)."""


@dataclass(slots=True)
class Incidents:
    """Counts what begins, not how long it lasts."""

    counts: Counter[str] = field(default_factory=Counter)
    _open: dict[str, set[str]] = field(default_factory=dict)

    def observe(self, kind: str, whom: Iterable[str]) -> set[str]:
        """`whom`: all that `kind` applies to now. Those that it did not apply to before are counted and returned."""
        now = set(whom)
        new = now - self._open.get(kind, set())
        self.counts[kind] += len(new)
        self._open[kind] = now
        return new

"""The end of a run, role by role: the trainer first, then all others, then what they share is taken down. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

STARTING = "starting"
ENDED = frozenset({"done", "stopped", "failed"})


@dataclass(frozen=True, slots=True)
class Hearing:
    """What a replica last said. `silent`: too long ago to wait for it. `stopping`: it has heard of the end."""

    trains: bool
    state: str
    stopping: bool = False
    silent: bool = False

    @property
    def waited_for(self) -> bool:
        """The trainer finishes: its last step, the checkpoint of it, and the ledger's record. One that is coming up has
        nothing to save."""
        if self.silent or self.state in ENDED or (self.trains and self.state == STARTING):
            return False
        return self.trains or not self.stopping


def others_may_stop(replicas: Iterable[Hearing]) -> bool:
    """Whether the trainer needs nobody any more: until then the others serve it."""
    return not any(replica.trains and replica.waited_for for replica in replicas)


def all_stopped(replicas: Iterable[Hearing]) -> bool:
    """Whether nobody uses bus, weights and instances any more."""
    return not any(replica.waited_for for replica in replicas)

"""How a trainer goes on whose state may be older than what was trained and published.

A step that is trained again from the same rows publishes nothing until it passes the newest published one: the engines
have later weights than it. Where rows have to be made again, they ask for a version of their own, that of the older
state. A version number is never used twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Published:
    """The newest version that engines can take, and the step whose weights it has."""

    version: PolicyVersion
    step: int

    def at(self, step: int) -> PolicyVersion:
        """The version that the policy after `step` has, or would have if one had been published each step."""
        return PolicyVersion(self.version - (self.step - step))


def version_to_publish(
    step: int, published: Published | None, newest: Published | None, needed: PolicyVersion
) -> PolicyVersion | None:
    """What a trainer that goes on from its state after `step` has to publish first; None: the engines can go on.

    published: None when no engine can take any. newest: the highest version ever published, whose weights may be gone;
    None before the first. needed: what the open prompt groups ask for. Where only the weights of this very step are
    gone, they come again under their own number.
    """
    if published is not None and step <= published.step and needed <= published.version:
        return None
    if newest is None:
        return needed
    if published is None and newest.step == step and needed <= newest.version:
        return newest.version
    return PolicyVersion(max(newest.version + 1, needed))


def next_version(step: int, published: Published) -> PolicyVersion | None:
    """The version that a step just trained publishes; None while steps are trained again."""
    return PolicyVersion(published.version + 1) if step > published.step else None

"""Advantages that do not depend on the scale of the reward: centred ranks within the group (as evolution strategies
shape their fitness: Salimans et al., arXiv 1703.03864, section 2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from relax.algorithms import ScoredRow


def centred_ranks(rows: Sequence[ScoredRow]) -> Mapping[str, float]:
    """Rank of a row's reward in its group, from -1/2 to 1/2; equal rewards share the mean of their ranks."""
    groups: dict[str, list[ScoredRow]] = defaultdict(list)
    for row in rows:
        groups[row.group_id].append(row)
    advantages: dict[str, float] = {}
    for members in groups.values():
        rewards = [row.reward for row in members]
        for row in members:
            below = sum(reward < row.reward for reward in rewards)
            equal = sum(reward == row.reward for reward in rewards)
            rank = below + (equal - 1) / 2
            advantages[row.row_id] = rank / max(1, len(rewards) - 1) - 0.5
    return advantages

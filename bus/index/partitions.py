"""Which TransferQueue partition a new storage row goes to, and which partitions are empty."""

from __future__ import annotations

from collections import Counter, deque


class Partitions:
    """One open partition per topic; it moves on after `rows_per_partition` rows."""

    def __init__(self, rows_per_partition: int) -> None:
        self._bound = rows_per_partition
        self._number: Counter[str] = Counter()
        self._filled: Counter[str] = Counter()
        self._live: Counter[str] = Counter()
        self.empty: deque[str] = deque()
        """Partitions that are closed and hold no row any more: the engine removes them."""

    def assign(self, topic: str) -> str:
        if self._filled[topic] >= self._bound:
            old = self._name(topic)
            self._number[topic] += 1
            self._filled[topic] = 0
            self._retire(old)
        self._filled[topic] += 1
        self._live[self._name(topic)] += 1
        return self._name(topic)

    def leave(self, partition: str) -> None:
        """One row of the partition was freed."""
        self._live[partition] -= 1
        self._retire(partition)

    def _name(self, topic: str) -> str:
        return f"{topic}@{self._number[topic]}"

    def _retire(self, partition: str) -> None:
        if not self._live[partition] and partition != self._name(partition.split("@")[0]):
            del self._live[partition]
            self.empty.append(partition)

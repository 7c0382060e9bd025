"""Ready queues: what each task may take next, kept up to date so that a lease costs O(log n)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Key = tuple[Any, ...]


class ReadyQueue(Generic[T]):
    """A heap of candidates ordered by `key`. `eligible` decides anew when one reaches the head.

    An item is offered whenever it may have become eligible; items that no longer are leave when
    they reach the head. So no transition ever has to search the heap.
    """

    def __init__(self, key: Callable[[T], Key], item_id: Callable[[T], str], eligible: Callable[[T], bool]) -> None:
        self._key = key
        self._item_id = item_id
        self._eligible = eligible
        self._heap: list[tuple[Key, int, T]] = []
        self._queued: dict[str, T] = {}
        self._pushes = 0

    def offer(self, item: T) -> bool:
        """Queue the item if it is eligible and not queued. True if it is eligible."""
        if not self._eligible(item):
            return False
        item_id = self._item_id(item)
        if self._queued.get(item_id) is not item:
            self._queued[item_id] = item
            self._pushes += 1
            heapq.heappush(self._heap, (self._key(item), self._pushes, item))
        return True

    def peek(self) -> T | None:
        while self._heap:
            item = self._heap[0][2]
            if self._eligible(item):
                return item
            self._drop_head()
        return None

    def pop(self) -> T | None:
        item = self.peek()
        if item is not None:
            self._drop_head()
        return item

    def _drop_head(self) -> None:
        _, _, item = heapq.heappop(self._heap)
        if self._queued.get(self._item_id(item)) is item:
            del self._queued[self._item_id(item)]

    def __len__(self) -> int:
        """Candidates, those that ceased to be eligible included."""
        return len(self._heap)

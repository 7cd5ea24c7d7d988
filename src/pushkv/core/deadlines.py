"""One next deadline for any number of machines."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

from .ids import FOREVER, Instant

__all__ = ["Deadlines"]

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """A heap with about one entry per machine, corrected lazily.

    An entry may be earlier than its machine's deadline, never later: a machine that moves its
    deadline out leaves its entry, and whoever pops it looks again. So the cost does not grow with
    traffic.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Instant, int, K]] = []
        self._earliest: dict[K, Instant] = {}
        self._serial = 0

    def set(self, key: K, at: Instant) -> None:
        """`key` wants to be looked at no later than `at`."""
        if at == FOREVER or at >= self._earliest.get(key, FOREVER):
            return
        self._earliest[key] = at
        self._serial += 1
        heapq.heappush(self._heap, (at, self._serial, key))

    def forget(self, key: K) -> None:
        """`key` is gone; its entry is skipped when it comes up."""
        self._earliest.pop(key, None)

    def next(self) -> Instant:
        """The earliest entry; FOREVER if there is none."""
        heap = self._heap
        while heap and self._earliest.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else FOREVER

    def due(self, now: Instant) -> list[K]:
        """The keys to look at by `now`, in order; each has to be `set` again."""
        found: list[K] = []
        while self.next() <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._earliest[key]
            found.append(key)
        return found

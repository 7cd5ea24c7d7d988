"""Virtual time: what is to happen, in order; the same order in every run."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

__all__ = ["Entry", "Timeline", "nanoseconds"]

Entry = list[object]
"""[when, serial, call or None]: an entry of the heap; `cancel` puts None in the last place."""


def nanoseconds(seconds: float) -> int:
    """Seconds as integer nanoseconds."""
    return round(seconds * 1e9)


class Timeline:
    """A heap of calls. `now` starts late enough that every engine has been up for long."""

    def __init__(self) -> None:
        self.start = 1_000_000_000_000
        self.now: int = self.start
        self.happened: int = 0
        self._heap: list[Entry] = []
        self._serial = count()

    def at(self, when: int, call: Callable[[], None]) -> Entry:
        """Call at `when`, in nanoseconds, or now if that is past; calls of one instant in order."""
        entry: Entry = [max(when, self.now), next(self._serial), call]
        heapq.heappush(self._heap, entry)
        return entry

    def after(self, delay: int, call: Callable[[], None]) -> Entry:
        """Call after `delay` nanoseconds."""
        return self.at(self.now + delay, call)

    @staticmethod
    def cancel(entry: Entry) -> None:
        """The call is not made."""
        entry[2] = None

    def step(self) -> bool:
        """Make the next call; False if there is none."""
        while self._heap:
            when, _, call = heapq.heappop(self._heap)
            if call is None:
                continue
            assert isinstance(when, int), "entries begin with their instant"
            assert callable(call), "and end with their call"
            self.now = when
            self.happened += 1
            call()
            return True
        return False

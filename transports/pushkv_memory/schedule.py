"""What is due when, and the thread that sees to it in real time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from heapq import heappop, heappush

from pushkv.core.ids import FOREVER, Instant

__all__ = ["Schedule", "Timer"]

Step = Callable[[Instant], None]


class Schedule:
    """Steps in order of time; those of one instant in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[Instant, int, Step]] = []
        self._count = 0

    def add(self, due: Instant, step: Step) -> None:
        """Run `step` at `due`; it is given the instant."""
        heappush(self._heap, (due, self._count, step))
        self._count += 1

    def next_due(self) -> Instant:
        """When the next step is due; FOREVER for none."""
        return self._heap[0][0] if self._heap else FOREVER

    def take(self, now: Instant) -> tuple[Instant, Step] | None:
        """The next step that is due at `now`, and its own instant."""
        if self.next_due() > now or not self._heap:
            return None
        due, _, step = heappop(self._heap)
        return due, step


class Timer:
    """A thread that calls `advance` when something is due; it ends when nothing is scheduled.

    Args:
        changed: The condition that guards the schedule.
        wait_s: How many seconds until the next step, or None for no step; called under `changed`.
        advance: Runs what is due; called without it.
    """

    def __init__(
        self,
        changed: threading.Condition,
        wait_s: Callable[[], float | None],
        advance: Callable[[], None],
    ) -> None:
        self._changed = changed
        self._wait_s = wait_s
        self._advance = advance
        self._thread: threading.Thread | None = None

    def nudge(self) -> None:
        """Something was scheduled; called under the condition."""
        if self._thread is None:
            if self._wait_s() is not None:
                self._thread = threading.Thread(target=self._run, name="pushkv-memory", daemon=True)
                self._thread.start()
        else:
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._sleep():
                self._advance()
        finally:
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _sleep(self) -> bool:
        """Until something is due; False when there is nothing to wait for."""
        with self._changed:
            while (wait_s := self._wait_s()) is not None:
                if wait_s <= 0:
                    return True
                self._changed.wait(wait_s)
            self._thread = None
            return False

"""What an engine's thread sees of pushkv: events go in, reports come out, nothing waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from pushkv.core.effects import Report
from pushkv.core.errors import LocalProtocolError
from pushkv.core.events import EngineEvent

__all__ = ["Bridge"]

SUBMITTED_MOST = 1_000_000


class Bridge:
    """A pair of queues between an engine's threads and the runtime's.

    `submit` and `take` never block and take no lock of ours: appending to and popping from a deque
    is atomic. Events of one thread keep their order, and so do reports.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._events: deque[EngineEvent] = deque()
        self._reports: deque[Report] = deque()
        self._ready = threading.Event()

    def submit(self, event: EngineEvent) -> None:
        """Hand an event to the runtime. Any thread; never blocks.

        Raises:
            LocalProtocolError: A million events wait already: the runtime is gone or wedged.
        """
        if len(self._events) >= SUBMITTED_MOST:
            raise LocalProtocolError(f"{SUBMITTED_MOST} events wait for the runtime")
        self._events.append(event)
        self._wake()

    def take(self, limit: int = 1024) -> list[Report]:
        """Up to `limit` reports, oldest first. One thread at a time; never blocks."""
        self._ready.clear()
        taken: list[Report] = []
        while self._reports and len(taken) < limit:
            taken.append(self._reports.popleft())
        if self._reports:
            self._ready.set()
        return taken

    def wait(self, bound_s: float) -> bool:
        """Whether reports are there, waiting for them up to `bound_s` seconds.

        The one call that waits, for an engine that has nothing else to do; `interrupt` ends it.
        """
        return self._ready.wait(bound_s) and bool(self._reports)

    def interrupt(self) -> None:
        """End a `wait` now. Any thread; never blocks."""
        self._ready.set()

    # -- the runtime's side

    def events(self) -> list[EngineEvent]:
        """All events submitted so far, in order. The runtime's thread only."""
        taken: list[EngineEvent] = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def report(self, report: Report) -> None:
        """Give a report to the engine. The runtime's thread only."""
        self._reports.append(report)
        self._ready.set()

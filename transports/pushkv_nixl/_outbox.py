"""What `poll` gives, and the promise that every WRITE is reported exactly once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import count

from pushkv.transport import Arrival, Completion, Write, WriteOutcome

__all__ = ["Outbox"]

_log = logging.getLogger("pushkv.nixl")


class Outbox:
    """News on their way to `poll`. Every method may be called from any thread; none takes a lock.

    The promise rests on `dict.pop` being atomic: of two threads that report one WRITE, as may
    happen when close runs out of time, one finds it and the other does not.
    """

    def __init__(self) -> None:
        self._news: deque[Completion | Arrival] = deque()
        self._owed: dict[int, Write] = {}
        self._numbers = count()
        self._silent = True
        self.wake: Callable[[], None] = lambda: None

    def owe(self, write: Write) -> int:
        """Take over the duty to report `write`; returns the number to report it by."""
        number = next(self._numbers)
        self._owed[number] = write
        return number

    @property
    def owes(self) -> bool:
        """Whether a WRITE is not reported yet."""
        return bool(self._owed)

    def withdraw(self, number: int) -> Write | None:
        """Take a WRITE back, so that its number reports nothing; None if it was reported."""
        return self._owed.pop(number, None)

    def report(
        self, number: int, outcome: WriteOutcome, cause: str = "", source_idle: bool = True
    ) -> None:
        """Report a WRITE, unless that has been done."""
        write = self._owed.pop(number, None)
        if write is None:
            return
        length_bytes = write.length_bytes if outcome is WriteOutcome.DONE else 0
        self._push(Completion(write.attempt, write.part, outcome, length_bytes, cause, source_idle))

    def report_all(self, outcome: WriteOutcome, cause: str, source_idle: bool) -> None:
        """Report every WRITE that has not been."""
        for number in list(self._owed):
            self.report(number, outcome, cause, source_idle)

    def arrived(self, arrival: Arrival) -> None:
        """Report an arrival."""
        self._push(arrival)

    def _push(self, news: Completion | Arrival) -> None:
        self._news.append(news)
        self._silent = False

    def flush(self) -> None:
        """Wake the reader once for all that was pushed since the last flush."""
        if self._silent:
            return
        self._silent = True
        try:
            self.wake()
        except Exception:  # noqa: BLE001 - the reader's own code must not end the thread
            _log.exception("wake() raised; news wait for the next poll()")

    def drain(self) -> list[Completion | Arrival]:
        """All news, oldest first."""
        found: list[Completion | Arrival] = []
        while True:
            try:
                found.append(self._news.popleft())
            except IndexError:
                return found

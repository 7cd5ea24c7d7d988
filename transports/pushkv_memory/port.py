"""One worker's end of a fabric: its memory, its news, and how to wake it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pushkv.core.ids import Worker
from pushkv.transport import Arrival, Completion, Region

from .copying import covers

__all__ = ["ARRIVALS_MOST", "Port"]

ARRIVALS_MOST = 65_536
"""Arrivals kept for a worker that does not look; older ones are lost, as a transport may."""


class Port:
    """Belongs to its fabric, whose lock guards it.

    `is_open` until the transport is closed; `crashed` workers are told nothing any more.
    """

    def __init__(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self.worker = worker
        self.clock = clock
        self.wake = wake
        self.regions: list[Region] = sorted(regions, key=lambda region: region.address)
        self.peers: dict[Worker, bytes] = {}
        self.open_writes: int = 0
        self.is_open: bool = True
        self.crashed: bool = False
        self._looking = False
        self._news: deque[Completion | Arrival] = deque()
        self._unseen: deque[Arrival] = deque(maxlen=ARRIVALS_MOST)

    def covers(self, address: int, length_bytes: int) -> bool:
        """Whether that range is registered here."""
        return covers(self.regions, address, length_bytes)

    def complete(self, completion: Completion) -> None:
        """Queue the one completion of a WRITE."""
        self.open_writes -= 1
        self._news.append(completion)

    def arrive(self, arrival: Arrival) -> bool:
        """Queue an arrival; whether the worker looks for them."""
        if not self._looking:
            self._unseen.append(arrival)
            return False
        self._news.append(arrival)
        return True

    def look(self, active: bool) -> bool:
        """Begin or stop to look for arrivals; whether some were waiting."""
        self._looking = active
        found = active and bool(self._unseen)
        if active:
            self._news.extend(self._unseen)
            self._unseen.clear()
        return found

    def take(self) -> tuple[Completion | Arrival, ...]:
        """All news since the last call."""
        news = tuple(self._news)
        self._news.clear()
        return news

    def die(self) -> None:
        """Nothing is told to this worker any more."""
        self.crashed, self.is_open = True, False
        self._news.clear()
        self._unseen.clear()

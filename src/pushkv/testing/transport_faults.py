"""Faults of a real transport that its contract allows: what it says is late, less, or worse.

The bytes are moved by the transport inside. Around it a test holds WRITEs back before they are
posted, holds news back, has a WRITE FAIL or be REFUSED before anything of it is posted, has one
that is DONE called UNKNOWN, and loses or repeats arrivals. Nothing is ever called better than it
is, so whatever holds for the machines over the transport inside must hold here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

from attrs import evolve

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import AttemptId, TransferId, Worker
from pushkv.transport import Arrival, Completion, Region, Transport, Write, WriteOutcome

__all__ = ["Fate", "Stage", "TransportFaults"]

_T = TypeVar("_T", Write, Completion | Arrival)


class Fate(Enum):
    """What becomes of a WRITE."""

    POSTED = "posted, and reported as it is"
    FAILED = "not posted: FAILED"
    REFUSED = "not posted: REFUSED"
    UNKNOWN = "posted; when it is over its outcome is UNKNOWN, and its source idle"
    UNKNOWN_BUSY = "the same, and nobody knows of its source either"


class Stage(Enum):
    """Where something of a transfer can be held back."""

    POST = "before its WRITEs are posted; the permit is checked when they go"
    COMPLETION = "when its WRITEs are over"
    ARRIVAL = "when its parts have arrived"


class TransportFaults:
    """A transport around another one. The runtime's thread calls it; a test may from any other.

    Args:
        inner: What moves the bytes.
        shows_done: Whether to declare `done_means_visible`, where `inner` does.

    Attributes:
        posted: The WRITEs ordered so far.
        arrivals: How often each arrival is told: 0 for lost, 2 for repeated.
    """

    def __init__(self, inner: Transport, *, shows_done: bool = True) -> None:
        self.posted: list[Write] = []
        self.arrivals = 1
        self._inner = inner
        self._shows_done = shows_done
        self._wake: Callable[[], None] = lambda: None
        self._fates: defaultdict[TransferId, deque[Fate]] = defaultdict(deque)
        self._held: set[tuple[Stage, TransferId]] = set()
        self._worse: dict[tuple[AttemptId, int], Fate] = {}
        self._writes: deque[Write] = deque()
        self._news: deque[Completion | Arrival] = deque()

    # -- what a test says

    def fate(self, transfer: str, *fates: Fate) -> None:
        """What becomes of the transfer's next WRITEs, in order; of those beyond: POSTED."""
        self._fates[TransferId(transfer)].extend(fates)

    def hold(self, stage: Stage, transfer: str) -> None:
        """Hold back what concerns this transfer."""
        self._held.add((stage, TransferId(transfer)))

    def release(self, stage: Stage, transfer: str) -> None:
        """End `hold`; what was held goes on."""
        self._held.discard((stage, TransferId(transfer)))
        self._wake()

    def over(self, transfer: str) -> int:
        """How many WRITEs of the transfer are over and not told of."""
        news = tuple(self._news)
        return sum(
            isinstance(each, Completion) and each.attempt.transfer == transfer for each in news
        )

    # -- the contract

    @property
    def capabilities(self) -> Capabilities:
        """Those of the transport inside, or less."""
        inner = self._inner.capabilities
        return evolve(inner, done_means_visible=inner.done_means_visible and self._shows_done)

    @property
    def version(self) -> str:
        """That of the transport inside."""
        return self._inner.version

    def start(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        """Start the transport inside."""
        self._wake = wake
        self._inner.start(worker, regions, clock, wake)

    def memory(self) -> bytes:
        """As the transport inside."""
        return self._inner.memory()

    def add_peer(self, peer: Worker, memory: bytes) -> None:
        """As the transport inside."""
        self._inner.add_peer(peer, memory)

    def remove_peer(self, peer: Worker) -> None:
        """As the transport inside."""
        self._inner.remove_peer(peer)

    def post(self, write: Write) -> None:
        """Order a WRITE, unless its fate is another one."""
        self.posted.append(write)
        fates = self._fates[write.attempt.transfer]
        fate = fates.popleft() if fates else Fate.POSTED
        if fate in (Fate.FAILED, Fate.REFUSED):
            outcome = WriteOutcome.FAILED if fate is Fate.FAILED else WriteOutcome.REFUSED
            self._news.append(Completion(write.attempt, write.part, outcome, 0, fate.value))
        else:
            self._worse[write.attempt, write.part] = fate
            self._writes.append(write)
        self._wake()

    def look_for_arrivals(self, active: bool) -> None:
        """As the transport inside."""
        self._inner.look_for_arrivals(active)

    def poll(self) -> Sequence[Completion | Arrival]:
        """What has happened, as far as it is to be told."""
        for write in self._let_go(self._writes, Stage.POST):
            self._inner.post(write)
        for news in self._inner.poll():
            if isinstance(news, Completion):
                self._news.append(self._worsened(news))
            else:
                self._news.extend([news] * self.arrivals)
        return self._let_go(self._news, None)

    def close(self, timeout_s: float) -> bool:
        """Stop. Of WRITEs that are held nothing was posted: they FAIL. News are held no more."""
        for write in self._writes:
            self._news.append(
                Completion(write.attempt, write.part, WriteOutcome.FAILED, 0, "closed")
            )
        self._writes.clear()
        self._held.clear()
        return self._inner.close(timeout_s)

    def _let_go(self, queue: deque[_T], stage: Stage | None) -> list[_T]:
        """What is not held, in order."""
        going, staying = list[_T](), list[_T]()
        while queue:
            item = queue.popleft()
            at = stage or (Stage.COMPLETION if isinstance(item, Completion) else Stage.ARRIVAL)
            held = (at, item.attempt.transfer) in self._held
            (staying if held else going).append(item)
        queue.extend(staying)
        return going

    def _worsened(self, news: Completion) -> Completion:
        fate = self._worse.pop((news.attempt, news.part), Fate.POSTED)
        if fate is Fate.POSTED:
            return news
        if news.outcome is WriteOutcome.REFUSED:  # nothing was posted: it is the next one's
            self._fates[news.attempt.transfer].appendleft(fate)
            return news
        return evolve(
            news,
            outcome=WriteOutcome.UNKNOWN,
            cause=fate.value,
            source_idle=news.source_idle and fate is Fate.UNKNOWN,
        )

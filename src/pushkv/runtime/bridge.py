"""What an engine's thread sees of pushkv: events go in, reports come out, nothing waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeGuard

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    Report,
    RetryDue,
    SourceReleased,
    SourceYielded,
)
from pushkv.core.errors import ConfigurationError, LocalProtocolError
from pushkv.core.events import Arrived, Cancelled, Computed, EngineEvent, Offered, PrefillAborted
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason
from pushkv.wire import DIGEST_BYTES_MOST, NAME_LENGTH_MOST

__all__ = ["Bridge"]

SUBMITTED_MOST = 1_000_000


class Bridge:
    """A pair of queues between an engine's threads and the runtime's.

    `submit` and `take` never block and take no lock of ours: appending to and popping from a deque
    is atomic. Events of one thread keep their order, and so do reports.

    No engine waits for ever: when the runtime stops or dies, every attempt without an outcome gets
    one, and whatever is submitted later is answered here.

    Args:
        wake: Called after each event that the runtime is to take; any thread.
        refused: Called with each failure that is answered here; any thread.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        refused: Callable[[NotDelivered | SourceReleased], None] = lambda report: None,
    ) -> None:
        self._wake = wake
        self._refused = refused
        self._events: deque[EngineEvent] = deque()
        self._reports: deque[Report] = deque()
        self._ready = threading.Event()
        self._listener: Callable[[], None] | None = None
        self._closed = False
        self._offers: dict[tuple[TransferId, int], Offered] = {}
        self._retries: dict[TransferId, int] = {}
        self._unserved: set[TransferId] = set()

    def submit(self, event: EngineEvent) -> None:
        """Hand an event to the runtime. Any thread; never blocks.

        After the runtime's end an offer is answered with NotDelivered(CLOSED) and BlocksReleased,
        and a request that only arrived then has its source released when its prefill is over.

        Raises:
            ConfigurationError: The transfer's name or prompt digest fits in no message.
            LocalProtocolError: A million events wait already: the runtime is wedged.
        """
        if isinstance(event, Offered | Arrived):
            _check(event)
        if len(self._events) >= SUBMITTED_MOST:
            raise LocalProtocolError(f"{SUBMITTED_MOST} events wait for the runtime")
        self._events.append(event)
        if self._closed:  # looked at after the append: `close` may not have seen the event
            self._answer()
        else:
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

    def on_report(self, call: Callable[[], None]) -> None:
        """Call `call` after each report from now on, for an engine that lives in an event loop.

        It runs in the thread that reports, the runtime's as a rule, and must not block.
        """
        self._listener = call

    # -- the runtime's side

    def events(self) -> list[EngineEvent]:
        """All events submitted so far, in order. The runtime's thread only."""
        taken: list[EngineEvent] = []
        while (event := self._next()) is not None:
            taken.append(event)
            if isinstance(event, Offered):
                self._offers[event.transfer, event.attempt] = event
            if isinstance(event, Offered | Cancelled):
                self._retries.pop(event.transfer, None)
        return taken

    def offer(self, report: Report) -> Offered | None:
        """The offer that `report` is the outcome of. The runtime's thread only."""
        if isinstance(report, SourceReleased | SourceYielded):
            return None
        return self._offers.get((report.transfer, report.attempt))

    def report(self, report: Report) -> None:
        """Give a report to the engine. The runtime's thread only."""
        if isinstance(report, Delivered | NotDelivered):
            self._offers.pop((report.transfer, report.attempt), None)
        if isinstance(report, NotDelivered) and report.retry:
            self._retries[report.transfer] = report.attempt
        elif isinstance(report, RetryDue):
            self._retries.pop(report.transfer, None)
        self._tell(report)

    def close(self) -> None:
        """The runtime takes no more events: from now on each is answered here."""
        self._closed = True
        self._answer()

    def end(self) -> list[NotDelivered]:
        """The runtime is over: what it still owes the engine is told now; returns the outcomes.

        Blocks it knew of are not released: nobody watches any more who writes into them.
        """
        self.close()
        outcomes = [NotDelivered(*key, Reason.CLOSED, False) for key in self._offers]
        for outcome in outcomes:
            self._tell(outcome)
        for transfer, attempt in self._retries.items():
            self._tell(RetryDue(transfer, attempt))  # its offer is then answered at once
        self._offers.clear()
        self._retries.clear()
        self._ready.set()
        return outcomes

    # -- inside

    def _next(self) -> EngineEvent | None:
        try:
            return self._events.popleft()
        except IndexError:  # another thread may have taken the last one
            return None

    def _tell(self, report: Report) -> None:
        self._reports.append(report)
        self._ready.set()
        if self._listener is not None:
            self._listener()

    def _answer(self) -> None:
        """For a runtime that has not seen these events: it never registered their blocks."""
        while (event := self._next()) is not None:
            if isinstance(event, Offered):
                self._refuse(NotDelivered(event.transfer, event.attempt, Reason.CLOSED, False))
                self._tell(BlocksReleased(event.transfer, event.attempt))
            elif isinstance(event, Arrived):
                self._unserved.add(event.transfer)
            elif _is_over(event) and event.transfer in self._unserved:
                self._unserved.discard(event.transfer)
                self._refuse(SourceReleased(event.transfer, Reason.CLOSED))

    def _refuse(self, report: NotDelivered | SourceReleased) -> None:
        self._refused(report)
        self._tell(report)


def _is_over(event: EngineEvent) -> TypeGuard[Computed | PrefillAborted]:
    """Whether a prefill will not go on."""
    return isinstance(event, PrefillAborted) or (isinstance(event, Computed) and event.final)


def _check(event: Offered | Arrived) -> None:
    """What a message cannot carry would be sent in vain until its link is doubted."""
    name, digest = event.transfer, event.prompt_digest
    if not 1 <= len(name) <= NAME_LENGTH_MOST or not name.isprintable():
        raise ConfigurationError(
            "transfer", name[:80], f"1 to {NAME_LENGTH_MOST} printable characters"
        )
    if len(digest) > DIGEST_BYTES_MOST:
        raise ConfigurationError("prompt_digest", digest[:80], f"up to {DIGEST_BYTES_MOST} bytes")

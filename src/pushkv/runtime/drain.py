"""A drained engine: takes nothing new, finishes what is under way, and says when that is over.

What is new is answered before the machines see it. Offered blocks come back at once, and the
engine computes the prompt itself or fails the request, as it does after any other failure. The
prefill of a new request is served to nobody: who registers for it is told so at once, and its
source comes back when it is over. A retry of what is under way is part of it, and goes on.
"""

from __future__ import annotations

from pushkv.core.effects import (
    BlocksReleased,
    NotDelivered,
    Report,
    SourceReleased,
    SourceYielded,
)
from pushkv.core.endpoint import Endpoint
from pushkv.core.events import (
    Arrived,
    Computed,
    EngineEvent,
    Offered,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
)
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason

__all__ = ["Drain"]

PREFILL = Computed | PrefillAborted | PrefillPreempted | PrefillResumed


class Drain:
    """What is taken, and what is left. The runtime's thread only, but for `is_on`.

    Attributes:
        is_on: Nothing new is taken. Any thread may set it.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.is_on = False
        self._endpoint = endpoint
        self._unserved: set[TransferId] = set()

    def answer(self, event: EngineEvent) -> tuple[Report, ...] | None:
        """What the engine hears of an event that goes no further; None for one that goes on."""
        if isinstance(event, Offered):
            if not self.is_on or self._is_under_way(event):
                return None
            refusal = NotDelivered(event.transfer, event.attempt, Reason.CLOSED, False)
            return refusal, BlocksReleased(event.transfer, event.attempt)
        if isinstance(event, Arrived):
            if not self.refuses(event.transfer):
                return None
            self._unserved.add(event.transfer)
            return ()
        if isinstance(event, PREFILL) and event.transfer in self._unserved:
            return self._unread(event)
        return None

    def refuses(self, transfer: TransferId) -> bool:
        """Whether nobody is served the prefill of `transfer`."""
        held = self._endpoint.sending.holds(transfer)
        return transfer in self._unserved or (self.is_on and not held)

    def left(self, open_writes: int) -> int:
        """How much is under way: attempts, prefills that may be read, WRITEs.

        A quarantine is under way until it ends. A verdict that waits to be received is not: what
        is queued still leaves when the runtime stops.
        """
        receiving, sending = self._endpoint.receiving, self._endpoint.sending
        return len(receiving.requests.states) + len(sending.transfers()) + open_writes

    def _is_under_way(self, event: Offered) -> bool:
        """A retry, or blocks for nothing: those tell a producer that it need not wait."""
        again = event.failures > 0 or self._endpoint.receiving.is_live(event.transfer)
        return again or event.start == event.end

    def _unread(self, event: PREFILL) -> tuple[Report, ...]:
        """Nothing reads the blocks of a prefill that nobody is served."""
        if isinstance(event, PrefillPreempted):
            return (SourceYielded(event.transfer),)
        if isinstance(event, PrefillResumed) or (isinstance(event, Computed) and not event.final):
            return ()
        self._unserved.discard(event.transfer)
        return (SourceReleased(event.transfer, Reason.CLOSED),)

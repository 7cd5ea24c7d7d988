"""Notices from peers, put together into arrivals. Used by the agent's thread alone."""

from __future__ import annotations

import logging
from collections import OrderedDict

from attrs import evolve

from pushkv.core.errors import RemoteProtocolError
from pushkv.core.ids import Worker
from pushkv.transport import Arrival

from ._codec import Notice, decode_notice

__all__ = ["PARTIAL_MAX", "PIECES_MAX", "Arrivals"]

_log = logging.getLogger("pushkv.nixl")

PARTIAL_MAX = 4096
"""Most parts of which some but not all pieces are known; of more, the oldest is given up."""

PIECES_MAX = 65_536
"""Most pieces a part may have: 4 TiB of full pieces."""


_SENDERS_MAX = 1000


class Arrivals:
    """Puts notices together; drops and counts what is not for this worker or not a notice.

    Attributes:
        dropped: Notices dropped so far.
        senders: The agents that notices came from, the first thousand.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._partial: OrderedDict[tuple[str, Notice], set[int]] = OrderedDict()
        self.dropped = 0
        self.senders: set[str] = set()

    def take(self, sender: str, data: bytes) -> Arrival | None:
        """The arrival that this notice, from agent `sender`, completes, if it completes one."""
        try:
            notice = decode_notice(data)
            if notice.pieces > PIECES_MAX:
                raise RemoteProtocolError("notice.pieces", notice.pieces, f"at most {PIECES_MAX}")
        except RemoteProtocolError as error:
            self._drop(sender, str(error))
            return None
        if len(self.senders) < _SENDERS_MAX:
            self.senders.add(sender)
        attempt = notice.attempt
        named = Worker(attempt.consumer, attempt.consumer_incarnation, attempt.consumer_rank)
        if named != self._worker:
            self._drop(sender, f"for {named}, not for {self._worker}")
            return None
        if notice.pieces > 1 and not self._complete(sender, notice):
            return None
        return Arrival(attempt, notice.part, notice.token, notice.length_bytes)

    def _complete(self, sender: str, notice: Notice) -> bool:
        key = (sender, evolve(notice, piece=0))
        seen = self._partial.setdefault(key, set())
        seen.add(notice.piece)
        if len(seen) == notice.pieces:
            del self._partial[key]
            return True
        if len(self._partial) > PARTIAL_MAX:
            (oldest, stale), _ = self._partial.popitem(last=False)
            self._drop(oldest, f"part {stale.part} of {stale.attempt} never became whole")
        return False

    def _drop(self, sender: str, why: str) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th, … is logged
            _log.warning("dropped %d notices; the last, from %r: %s", self.dropped, sender, why)

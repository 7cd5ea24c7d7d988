"""What vLLM's scheduler has been told about each request that receives its KV cache.

vLLM trusts a connector blindly: a completion of a request that it does not know, or that does not
wait for one, is an assertion in EngineCore and ends every request of the engine; a completion that
never comes pins blocks for ever. This ledger is where that trust is earned. A request becomes *due*
exactly once for each attempt that was offered, whatever is reported late, twice or about nobody,
and whichever of outcome and abort comes first:

==========  =========================  ==============================  ==========================
phase       vLLM's view                what the runtime reports        request finished (abort)
==========  =========================  ==============================  ==========================
WANTED      not scheduled, or again    stale                           forgotten; P is told
WAITING     WAITING_FOR_REMOTE_KVS     outcome: due, and DELIVERED or  due; cancelled; forgotten
                                       LOCAL; to be retried: BACKOFF
BACKOFF     WAITING_FOR_REMOTE_KVS     retry due: WAITING again on     due; cancelled; forgotten
                                       the same blocks if they are
                                       released, else due and WANTED
DELIVERED   running, preempted         stale                           forgotten
LOCAL       prefills here              stale                           forgotten
==========  =========================  ==============================  ==========================

So a retry is not yet a failure: vLLM hears nothing of it unless the old blocks are still exposed
and it must allocate others. Its `kv_load_failure_policy` then says whether that ends the request.

Why an abort in WAITING or BACKOFF must make the request due: vLLM then keeps the entry and its
blocks until the id comes back as received, and steps the engine until it does. Why an abort after
that must not: the scheduler has freed, or is about to free, both.

The ledger holds no block, no lock and no clock, and lives on the scheduler's thread.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from attrs import define, evolve, field, frozen

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    ProducerAddress,
    RetryDue,
)
from pushkv.core.events import Offered
from pushkv.core.ids import TransferId
from pushkv.rank_plan import Ranks

__all__ = ["Due", "Entry", "Ledger", "Parting", "Phase"]


class Phase(StrEnum):
    """Where a request that receives its KV cache stands."""

    WANTED = "wanted"
    WAITING = "waiting"
    BACKOFF = "backoff"
    DELIVERED = "delivered"
    LOCAL = "local"


class Parting(StrEnum):
    """What the producer, or the core, must hear when a request finishes."""

    NOTHING = "nothing"
    DECLINE = "decline"
    """No attempt is under way, and none will come: the producer holds its KV for nobody."""
    CANCEL = "cancel"
    """An attempt or a backoff is under way."""


@define
class Entry:
    """One request that receives its KV cache.

    Attributes:
        ranks: The producer's; rank r listens at the port of `producer` + r.
        offer: The last attempt, once there was one.
        released: Nothing can write into the blocks of `offer` any more.
        failures: Attempts that failed.
    """

    request_id: str
    transfer: TransferId
    producer: ProducerAddress
    digest: bytes
    tokens: int
    phase: Phase = Phase.WANTED
    offer: Offered | None = None
    released: bool = False
    failures: int = 0
    ranks: Ranks = Ranks()  # noqa: RUF009  - frozen

    @property
    def producers(self) -> tuple[ProducerAddress, ...]:
        """The addresses of all ranks of the producer."""
        first = self.producer
        return tuple(
            evolve(first, port=first.port + rank, rank=rank) for rank in range(self.ranks.count)
        )


@frozen
class Due:
    """Ids to report to vLLM in this step; `failed` is part of `finished`, as vLLM wants it."""

    finished: frozenset[str]
    failed: frozenset[str]


NOTHING_DUE = Due(frozenset(), frozenset())


@define
class Ledger:
    """All requests that receive their KV cache at this engine, and what is due for them.

    Attributes:
        counts: How often something was dropped because it concerned nobody any more.
    """

    counts: Counter[str] = field(factory=Counter)
    _entries: dict[str, Entry] = field(factory=dict)
    _transfers: dict[TransferId, str] = field(factory=dict)
    _attempts: dict[int, str] = field(factory=dict)
    _due: dict[str, bool] = field(factory=dict)
    _numbers: itertools.count[int] = field(factory=lambda: itertools.count(1))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: str) -> Entry | None:
        """The entry of a live request, if it has one."""
        return self._entries.get(request_id)

    def takes(self, transfer: TransferId) -> bool:
        """Whether no live request uses this transfer: never two registrations under one key."""
        return transfer not in self._transfers

    def add(self, entry: Entry) -> None:
        """A new request wants its KV cache. Its id and its transfer must be free."""
        assert entry.request_id not in self._entries, f"{entry.request_id} is already known"
        assert entry.transfer not in self._transfers, f"{entry.transfer} is already in use"
        self._entries[entry.request_id] = entry
        self._transfers[entry.transfer] = entry.request_id

    def running(self) -> Iterable[int]:
        """The attempts whose outcome is not known yet; each has one within a bound."""
        return self._attempts.keys()

    @property
    def waits(self) -> bool:
        """Whether the outcome of some attempt is not known yet."""
        return bool(self._attempts)

    @property
    def is_due(self) -> bool:
        """Whether vLLM must hear something in the next step."""
        return bool(self._due)

    def number(self) -> int:
        """A fresh attempt number: one counter per consumer incarnation, none used twice (R9)."""
        return next(self._numbers)

    def offered(self, entry: Entry, offer: Offered) -> None:
        """The request's blocks are offered: it waits for one outcome."""
        assert entry.phase in (Phase.WANTED, Phase.BACKOFF), f"{entry.request_id} is {entry.phase}"
        entry.phase, entry.offer, entry.released = Phase.WAITING, offer, False
        self._attempts[offer.attempt] = entry.request_id

    def prefill_here(self, entry: Entry) -> None:
        """The request is scheduled without a transfer."""
        assert entry.phase is Phase.WANTED, f"{entry.request_id} is {entry.phase}"
        entry.phase = Phase.LOCAL

    def delivered(self, report: Delivered) -> Entry | None:
        """An attempt delivered. Returns its entry unless the report is stale."""
        entry = self._outcome(report)
        if entry is not None:
            entry.phase = Phase.DELIVERED
            self._due[entry.request_id] = False
        return entry

    def not_delivered(self, report: NotDelivered) -> Entry | None:
        """An attempt failed. Returns its entry unless the report is stale."""
        entry = self._outcome(report)
        if entry is not None:
            entry.failures += 1
            if report.retry:
                entry.phase = Phase.BACKOFF
            else:
                entry.phase = Phase.LOCAL
                self._due[entry.request_id] = True
        return entry

    def released(self, report: BlocksReleased) -> None:
        """The blocks of an attempt are its engine's again; most attempts are over by then."""
        entry = self._of(report.transfer)
        if entry is not None and entry.offer is not None:
            entry.released |= entry.offer.attempt == report.attempt

    def retry_due(self, report: RetryDue) -> Entry | None:
        """The backoff is over. Returns the entry to offer again, unless the report is stale."""
        entry = self._of(report.transfer)
        if entry is None or entry.phase is not Phase.BACKOFF:
            self.counts["stale retry"] += 1
            return None
        assert entry.offer is not None, f"{entry.request_id} was never offered"
        if entry.offer.attempt != report.attempt:
            self.counts["stale retry"] += 1
            return None
        return entry

    def ask_for_others(self, entry: Entry) -> None:
        """The entry's blocks cannot be offered again: vLLM must allocate others, or give up."""
        assert entry.phase is Phase.BACKOFF, f"{entry.request_id} is {entry.phase}"
        entry.phase = Phase.WANTED
        self._due[entry.request_id] = True

    def finished(self, request_id: str) -> tuple[Entry | None, Parting]:
        """VLLM finished the request, for whatever reason: forget it.

        Returns:
            The entry, if there was one, and what remains to be said about it.
        """
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None, Parting.NOTHING
        del self._transfers[entry.transfer]
        if entry.phase in (Phase.WAITING, Phase.BACKOFF):
            assert entry.offer is not None, f"{request_id} was never offered"
            self._attempts.pop(entry.offer.attempt, None)
            self._due[request_id] = False
            return entry, Parting.CANCEL
        if request_id in self._due:
            # The outcome is in and vLLM has not heard it: it waits for the id, whatever the rest.
            self._due[request_id] = False
        if entry.phase is Phase.WANTED:
            return entry, Parting.DECLINE
        return entry, Parting.NOTHING

    def drain(self) -> Due:
        """What vLLM must hear in this step; each id is given once."""
        if not self._due:
            return NOTHING_DUE
        due = Due(
            frozenset(self._due), frozenset(name for name, failed in self._due.items() if failed)
        )
        self._due = {}
        return due

    def drain_received(self) -> frozenset[str]:
        """What vLLM may hear before a step, as `drain` says it: all that has not failed."""
        received = frozenset(name for name, failed in self._due.items() if not failed)
        for name in received:
            del self._due[name]
        return received

    def _of(self, transfer: TransferId) -> Entry | None:
        request_id = self._transfers.get(transfer)
        return None if request_id is None else self._entries[request_id]

    def _outcome(self, report: Delivered | NotDelivered) -> Entry | None:
        request_id = self._attempts.get(report.attempt)
        entry = self._entries.get(request_id) if request_id is not None else None
        if entry is None or entry.transfer != report.transfer:
            self.counts["stale outcome"] += 1
            return None
        assert entry.phase is Phase.WAITING, f"{entry.request_id} is {entry.phase}"
        del self._attempts[report.attempt]
        return entry

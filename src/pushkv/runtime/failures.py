"""One counter for every transfer that ends, and one structured log line if it fails (I8)."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from pushkv.core.consumer import Consumer
from pushkv.core.effects import (
    Delivered,
    MemberOutcome,
    MemberTold,
    NotDelivered,
    Report,
    SourceFreed,
    SourceReleased,
)
from pushkv.core.events import Offered
from pushkv.core.ids import TransferId, Worker
from pushkv.core.machines import StepRecord
from pushkv.core.messages import Reason
from pushkv.core.producer import Producer

__all__ = ["Failures"]

log: logging.Logger = logging.getLogger("pushkv.transfers")

WISHED = frozenset({Reason.CANCELLED, Reason.CLOSED, Reason.PREEMPTED})
"""Ends that an engine of ours asked for: nothing is wrong, so they are no warnings."""

OFFER, RUNTIME = "offer", "runtime"
"""Phases outside any machine: refused before there was one, or cut off with the runtime."""


class Failures:
    """Watches the machines' steps for who was on the other side and how far it had come.

    The fields of a line are attributes of its `LogRecord` too: transfer, attempt, cause, phase,
    rank, peer_engine, peer_incarnation, peer_rank; None where unknown. One thread, but for
    `cut_off`.
    """

    def __init__(self, rank: int, counters: Counter[str]) -> None:
        self._rank = rank
        self._counters = counters
        self._counting = threading.Lock()
        self._failed: dict[tuple[TransferId, int], Consumer] = {}
        self._freed: dict[TransferId, Producer] = {}

    def observe(self, record: StepRecord) -> None:
        """One step of a machine; what it says is kept until `forget`."""
        before = record.before
        for effect in record.effects:
            if isinstance(effect, MemberTold) and effect.outcome is not MemberOutcome.DELIVERED:
                assert isinstance(before, Consumer)
                # R12: the first member that fails is the reason; its siblings only follow.
                key = (effect.attempt.transfer, effect.attempt.attempt)
                self._failed.setdefault(key, before)
            elif isinstance(effect, SourceFreed):
                assert isinstance(before, Producer)
                self._freed[effect.transfer] = before

    def forget(self) -> None:
        """The event is dealt with, and all it had to report is reported."""
        self._failed.clear()
        self._freed.clear()

    def report(self, report: Report, offer: Offered | None) -> None:
        """Count `report` if a transfer ends with it, and log it if it is a failure."""
        if isinstance(report, Delivered):
            self._counters["delivered"] += 1
        elif isinstance(report, NotDelivered):
            state = self._failed.get((report.transfer, report.attempt))
            peer = None if state is None else state.producer
            phase = OFFER if state is None else str(state.status)
            self._not_delivered(report, offer, peer, phase)
        elif isinstance(report, SourceReleased) and report.reason is None:
            self._counters["served"] += 1
        elif isinstance(report, SourceReleased) and report.reason is not None:
            source = self._freed.get(report.transfer)
            served = None if source is None else source.registration
            self._count(f"not_served_{report.reason}")
            self._say(
                "served",
                report.transfer,
                None if served is None else served.register.attempt.attempt,
                report.reason,
                None if served is None else served.consumer,
                "" if source is None else str(source.status),
            )

    def cut_off(self, report: NotDelivered | SourceReleased) -> None:
        """Log and count what ends, or never begins, because the runtime is over. Any thread."""
        if isinstance(report, NotDelivered):
            self._not_delivered(report, None, None, RUNTIME)
        elif report.reason is not None:
            self._count(f"not_served_{report.reason}")
            self._say("served", report.transfer, None, report.reason, None, RUNTIME)

    def _not_delivered(
        self, report: NotDelivered, offer: Offered | None, peer: Worker | None, phase: str
    ) -> None:
        self._count(f"not_delivered_{report.reason}")
        address = ""
        if offer is not None:
            address = ",".join(f"{each.host}:{each.port}" for each in offer.producers)
        self._say("delivered", report.transfer, report.attempt, report.reason, peer, phase, address)

    def _count(self, cause: str) -> None:
        with self._counting:  # adding to a number is two steps
            self._counters[cause] += 1

    def _say(
        self,
        verb: str,
        transfer: TransferId,
        attempt: int | None,
        reason: Reason,
        peer: Worker | None,
        phase: str,
        address: str = "",
    ) -> None:
        log.log(
            logging.INFO if reason in WISHED and phase != RUNTIME else logging.WARNING,
            "transfer %s attempt %s not %s: %s in phase %s at rank %d, peer %s%s",
            transfer,
            "-" if attempt is None else attempt,
            verb,
            reason,
            phase or "-",
            self._rank,
            "unknown"
            if peer is None
            else f"{peer.engine} incarnation {peer.incarnation:016x} rank {peer.rank}",
            f" at {address}" if address else "",
            extra={
                "transfer": transfer,
                "attempt": attempt,
                "cause": str(reason),
                "phase": phase,
                "rank": self._rank,
                "peer_engine": None if peer is None else peer.engine,
                "peer_incarnation": None if peer is None else peer.incarnation,
                "peer_rank": None if peer is None else peer.rank,
            },
        )

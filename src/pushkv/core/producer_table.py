"""The producer's table: every (status, event) pair, decided. See ``producer`` for the theory."""

from __future__ import annotations

from . import producer_actions as act
from .effects import LinkDown
from .events import (
    Arrived,
    Computed,
    Permitted,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
    Proven,
    RegistrationReceived,
    Tick,
    WriteDone,
    WriteFailed,
    WriteRefused,
    WriterGone,
    WriteUnknown,
)
from .messages import Query, Received, Revoke
from .producer import (
    DONE,
    DRAINING,
    EXPECTED,
    EXPIRED,
    FAILED,
    HOLDING,
    LIVE,
    NOTIFYING,
    OVER,
    PREEMPTED,
    PREFILLING,
    QUEUED,
    RETRYING,
    WRITING,
    Producer,
    ProducerStatus,
)
from .table import Table

__all__ = ["PRODUCER"]

EVENTS = (
    Arrived,
    Computed,
    PrefillPreempted,
    PrefillResumed,
    PrefillAborted,
    RegistrationReceived,
    Query,
    Revoke,
    Received,
    LinkDown,
    Permitted,
    WriteDone,
    WriteFailed,
    WriteRefused,
    WriteUnknown,
    WriterGone,
    Proven,
    Tick,
)
SERVING = (PREFILLING, PREEMPTED, WRITING, RETRYING)
AFTER_DRAIN = (DRAINING, QUEUED, PREFILLING, PREEMPTED, HOLDING, FAILED)
SERVED = (PREFILLING, PREEMPTED, WRITING, NOTIFYING)


def _build() -> Table[Producer]:
    table: Table[Producer] = Table("producer", ProducerStatus, EVENTS)
    _engine_rows(table)
    _consumer_rows(table)
    _link_rows(table)
    _transport_rows(table)
    _time_rows(table)
    return table.freeze()


def _engine_rows(table: Table[Producer]) -> None:
    on, ignore = table.on, table.ignore
    on(EXPECTED, Arrived, to=QUEUED, do=act.arrived, why="the registered request is here")
    on(OVER, Arrived, to=QUEUED, do=act.arrived, why="a request, perhaps under a name used before")
    ignore(
        (QUEUED, PREFILLING, PREEMPTED, HOLDING, WRITING, RETRYING, DRAINING),
        Arrived,
        why="I5: one live request per transfer",
    )
    on(
        (QUEUED, PREFILLING, PREEMPTED),
        Computed,
        to=(*SERVED, HOLDING, DRAINING, QUEUED),
        do=act.computed,
        why="finished blocks are ordered at once; the rest when prefill is over",
    )
    on(DRAINING, Computed, to=DRAINING, do=act.computed, why="prefill goes on while it drains")
    ignore((EXPECTED, HOLDING, WRITING, RETRYING, *OVER), Computed, why="I5: no prefill runs here")
    on(
        PREFILLING,
        PrefillPreempted,
        to=PREEMPTED,
        do=act.preempted,
        why="the source goes once nothing reads it",
    )
    on(
        DRAINING,
        PrefillPreempted,
        to=DRAINING,
        do=act.preempted,
        why="prefill may stop while it drains",
    )
    ignore(
        (EXPECTED, QUEUED, PREEMPTED, HOLDING, WRITING, RETRYING, *OVER),
        PrefillPreempted,
        why="I5: no prefill runs here",
    )
    on(PREEMPTED, PrefillResumed, to=PREFILLING, do=act.resumed, why="prefill begins again")
    on(DRAINING, PrefillResumed, to=DRAINING, do=act.resumed, why="prefill goes on while it drains")
    ignore(
        (EXPECTED, QUEUED, PREFILLING, HOLDING, WRITING, RETRYING, *OVER),
        PrefillResumed,
        why="I5: it was not preempted",
    )
    on(
        (QUEUED, PREFILLING, PREEMPTED, HOLDING, WRITING, RETRYING),
        PrefillAborted,
        to=(DRAINING, FAILED),
        do=act.aborted,
        why="R8: told to the consumer when every handle is closed",
    )
    on(DRAINING, PrefillAborted, to=DRAINING, do=act.aborted, why="it ends when it has drained")
    ignore((EXPECTED, *OVER), PrefillAborted, why="I5: nothing to give up")


def _consumer_rows(table: Table[Producer]) -> None:
    on = table.on
    on(
        (EXPECTED, QUEUED, PREFILLING, PREEMPTED, HOLDING, WRITING, RETRYING, DRAINING),
        RegistrationReceived,
        to=(EXPECTED, QUEUED, HOLDING, RETRYING, DRAINING, *SERVED),
        do=act.register,
        why="R7: an ended attempt is answered; one consumer at a time is served",
    )
    on(
        OVER,
        RegistrationReceived,
        to=(EXPECTED, *OVER),
        do=act.register_late,
        why="R7: answered from memory; nothing is left to serve a new attempt from",
    )
    everywhere = tuple(ProducerStatus)
    for status in everywhere:
        on(
            status,
            Query,
            to=status,
            do=act.query,
            why="R7: what became of it, or that it is unknown",
        )
        if status in OVER:
            on(status, Revoke, to=status, do=act.revoke, why="R1: answered in every status")
        if status is not NOTIFYING:
            on(status, Received, to=status, do=act.received, why="R7: it may be forgotten now")
    on(
        NOTIFYING,
        Received,
        to=(NOTIFYING, DONE),
        do=act.received,
        why="R7: it may be forgotten now",
    )
    on(
        LIVE,
        Revoke,
        to=(EXPECTED, RETRYING, WRITING, *AFTER_DRAIN),
        do=act.revoke,
        why="R8: answered at once if nothing is open, else when the last handle has closed",
    )


def _link_rows(table: Table[Producer]) -> None:
    on, ignore = table.on, table.ignore
    on(
        LIVE,
        LinkDown,
        to=(EXPECTED, RETRYING, WRITING, *AFTER_DRAIN),
        do=act.link_down,
        why="R11: nothing more is posted for registrations made over it",
    )
    ignore(OVER, LinkDown, why="R11: what is remembered survives the link")
    on(
        SERVING,
        Permitted,
        to=(*SERVED, RETRYING, DRAINING),
        do=act.permitted,
        why="R3: WRITEs may go on",
    )
    ignore(
        (EXPECTED, QUEUED, HOLDING, DRAINING, *OVER), Permitted, why="nothing waits for a permit"
    )


def _transport_rows(table: Table[Producer]) -> None:
    on, ignore = table.on, table.ignore
    after = (*SERVED, RETRYING, *AFTER_DRAIN)
    on(SERVING, WriteDone, to=after, do=act.done, why="R10: done parts are kept for the verdict")
    on(
        SERVING,
        WriteFailed,
        to=after,
        do=act.write_failed,
        why="a few times again, under new part numbers",
    )
    on(
        SERVING,
        WriteRefused,
        to=after,
        do=act.write_refused,
        why="R5: nothing was posted; the tokens wait for a permit",
    )
    on(
        SERVING,
        WriteUnknown,
        to=after,
        do=act.write_unknown,
        why="R14: an error code proves nothing about bytes in flight",
    )
    drains = "R8: the last handle lets the verdict go"
    on(DRAINING, WriteDone, to=AFTER_DRAIN, do=act.done, why=drains)
    on(DRAINING, WriteFailed, to=AFTER_DRAIN, do=act.write_failed, why=drains)
    on(DRAINING, WriteRefused, to=AFTER_DRAIN, do=act.write_refused, why=drains)
    on(DRAINING, WriteUnknown, to=AFTER_DRAIN, do=act.write_unknown, why=drains)
    ignore(
        (EXPECTED, QUEUED, HOLDING, *OVER),
        WriteDone,
        WriteFailed,
        WriteRefused,
        WriteUnknown,
        why="I6: of an attempt that has ended",
    )
    on(DRAINING, WriterGone, to=AFTER_DRAIN, do=act.proof, why="R14: a proof closes it")
    on(DRAINING, Proven, to=AFTER_DRAIN, do=act.proof, why="R14: the operator's word closes it")
    ignore(
        (EXPECTED, QUEUED, PREFILLING, PREEMPTED, HOLDING, WRITING, RETRYING, *OVER),
        WriterGone,
        Proven,
        why="nothing is of unknown outcome",
    )


def _time_rows(table: Table[Producer]) -> None:
    on, ignore = table.on, table.ignore
    on(
        EXPECTED,
        Tick,
        to=(EXPECTED, FAILED),
        do=act.tick_expected,
        why="I7: a request that never comes must not hold the consumer",
    )
    on(
        HOLDING,
        Tick,
        to=(HOLDING, EXPIRED),
        do=act.tick_holding,
        why="I7: one hold time per transfer, never restarted",
    )
    on(
        (WRITING, RETRYING),
        Tick,
        to=(*SERVED, RETRYING, *AFTER_DRAIN),
        do=act.tick_writing,
        why="I7: the transfer clock, and the backoff before a retry",
    )
    on(
        DRAINING,
        Tick,
        to=AFTER_DRAIN,
        do=act.tick_draining,
        why="I7: unknown handles close after their bound; the others are unproven",
    )
    ignore((QUEUED, PREFILLING, PREEMPTED, *OVER), Tick, why="the engine keeps the time here")


PRODUCER = _build()
"""The producer's table, frozen."""

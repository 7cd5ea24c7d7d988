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
AFTER_DRAIN = (DRAINING, PREFILLING, PREEMPTED, HOLDING, FAILED)
DRAINED: dict[ProducerStatus, tuple[ProducerStatus, ...]] = {
    EXPECTED: (FAILED,),
    QUEUED: (),
    PREFILLING: (DRAINING,),
    PREEMPTED: (DRAINING,),
    HOLDING: (),
    WRITING: (DRAINING, HOLDING),
    RETRYING: (DRAINING, HOLDING),
    DRAINING: (),
}
"""Where giving the registration up leads from each status, other than to itself."""
AFTER_DONE = {WRITING: (WRITING, NOTIFYING), RETRYING: (RETRYING, WRITING)}
AFTER_FAILED = {WRITING: (RETRYING,), RETRYING: (WRITING,)}


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
    ordered = "finished blocks are ordered at once; the rest when prefill is over"
    served = (PREFILLING, HOLDING, WRITING, NOTIFYING)
    on(QUEUED, Computed, to=served, do=act.computed, why=ordered)
    on(
        (PREFILLING, PREEMPTED),
        Computed,
        to=(*served, DRAINING),
        do=act.computed,
        why=ordered,
    )
    on(
        DRAINING,
        Computed,
        to=DRAINING,
        do=act.computed_draining,
        why="prefill goes on while it drains",
    )
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
        do=act.preempted_draining,
        why="prefill may stop while it drains",
    )
    ignore(
        (EXPECTED, QUEUED, PREEMPTED, HOLDING, WRITING, RETRYING, *OVER),
        PrefillPreempted,
        why="I5: no prefill runs here",
    )
    on(PREEMPTED, PrefillResumed, to=PREFILLING, do=act.resumed, why="prefill begins again")
    on(
        DRAINING,
        PrefillResumed,
        to=DRAINING,
        do=act.resumed_draining,
        why="prefill goes on while it drains",
    )
    ignore(
        (EXPECTED, QUEUED, PREFILLING, HOLDING, WRITING, RETRYING, *OVER),
        PrefillResumed,
        why="I5: it was not preempted",
    )
    _abort_rows(table)


def _abort_rows(table: Table[Producer]) -> None:
    on, ignore = table.on, table.ignore
    closed = "R8: told to the consumer when every handle is closed"
    on((QUEUED, HOLDING), PrefillAborted, to=FAILED, do=act.aborted, why=closed)
    on(
        (PREFILLING, PREEMPTED, WRITING, RETRYING),
        PrefillAborted,
        to=(DRAINING, FAILED),
        do=act.aborted,
        why=closed,
    )
    on(
        DRAINING,
        PrefillAborted,
        to=DRAINING,
        do=act.aborted_draining,
        why="it ends when it has drained",
    )
    ignore((EXPECTED, *OVER), PrefillAborted, why="I5: nothing to give up")


def _consumer_rows(table: Table[Producer]) -> None:
    on = table.on
    for status in LIVE:
        on(
            status,
            RegistrationReceived,
            to=(HOLDING, WRITING, NOTIFYING) if status is HOLDING else status,
            do=act.register,
            why="R7: an ended attempt is answered; one consumer at a time is served",
        )
    for status in OVER:
        on(
            status,
            RegistrationReceived,
            to=(EXPECTED, FAILED) if status is FAILED else status,
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
    for status in LIVE:
        on(
            status,
            Revoke,
            to=(status, *DRAINED[status]),
            do=act.revoke,
            why="R8: answered at once if nothing is open, else when the last handle has closed",
        )


def _link_rows(table: Table[Producer]) -> None:
    on, ignore = table.on, table.ignore
    for status in LIVE:
        if status in (HOLDING, DRAINING):
            continue
        on(
            status,
            LinkDown,
            to=(status, *DRAINED[status]),
            do=act.link_down,
            why="R11: nothing more is posted for registrations made over it",
        )
    on(
        DRAINING,
        LinkDown,
        to=DRAINING,
        do=act.link_down_draining,
        why="R11: the verdict is asked for over the next link",
    )
    ignore(HOLDING, LinkDown, why="nobody has registered over it")
    ignore(OVER, LinkDown, why="R11: what is remembered survives the link")
    for status in SERVING:
        on(
            status,
            Permitted,
            to=(status, WRITING) if status is RETRYING else status,
            do=act.permitted,
            why="R3: WRITEs may go on",
        )
    ignore(
        (EXPECTED, QUEUED, HOLDING, DRAINING, *OVER), Permitted, why="nothing waits for a permit"
    )


def _transport_rows(table: Table[Producer]) -> None:
    on, ignore = table.on, table.ignore
    for status in SERVING:
        on(
            status,
            WriteDone,
            to=AFTER_DONE.get(status, status),
            do=act.done,
            why="R10: done parts are kept for the verdict",
        )
        on(
            status,
            WriteFailed,
            to=(status, *AFTER_FAILED.get(status, ()), *DRAINED[status]),
            do=act.write_failed,
            why="a few times again, under new part numbers",
        )
        on(
            status,
            WriteRefused,
            to=(status, WRITING) if status is RETRYING else status,
            do=act.write_refused,
            why="R5: nothing was posted; the tokens wait for a permit",
        )
        on(
            status,
            WriteUnknown,
            to=(status, *DRAINED[status]),
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
    for status in (WRITING, RETRYING):
        on(
            status,
            Tick,
            to=(status, WRITING, *DRAINED[status]),
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

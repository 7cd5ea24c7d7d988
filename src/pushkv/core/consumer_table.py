"""The consumer's table: every (status, event) pair, decided. See ``consumer`` for the theory."""

from __future__ import annotations

from . import consumer_actions as act
from .consumer import (
    DELIVERED,
    FAILED,
    QUARANTINED,
    REGISTERED,
    REGISTERING,
    RELEASED,
    REVOKING,
    SETTLING,
    TERMINAL,
    WAITING,
    Consumer,
    ConsumerStatus,
)
from .effects import LinkDown, LinkUp
from .events import ArrivalSeen, Proven, Tick, Withdrawn, WriterGone
from .messages import Complete, Failed, Progress, Registered, Revoked, Unproven
from .table import Table

__all__ = ["CONSUMER"]

EVENTS = (
    LinkUp,
    LinkDown,
    Registered,
    Progress,
    Complete,
    Failed,
    Revoked,
    Unproven,
    ArrivalSeen,
    Withdrawn,
    WriterGone,
    Proven,
    Tick,
)


def _build() -> Table[Consumer]:
    table: Table[Consumer] = Table("consumer", ConsumerStatus, EVENTS)
    _link_rows(table)
    _news_rows(table)
    _verdict_rows(table)
    _wish_rows(table)
    _time_rows(table)
    table.ignore(TERMINAL, *EVENTS, why="I3: terminal states absorb")
    return table.freeze()


def _link_rows(table: Table[Consumer]) -> None:
    on, ignore = table.on, table.ignore
    on(
        REGISTERING,
        LinkUp,
        to=REGISTERING,
        do=act.link_up,
        why="the link is there: REGISTER goes out",
    )
    ignore((REGISTERED, SETTLING, REVOKING), LinkUp, why="a newer link ends the older one first")
    on(
        QUARANTINED,
        LinkUp,
        to=(QUARANTINED, REVOKING),
        do=act.link_back,
        why="R11: the same incarnation remembers the attempt and can be asked",
    )
    on(
        REGISTERING,
        LinkDown,
        to=(REGISTERING, QUARANTINED, FAILED, RELEASED),
        do=act.link_down_registering,
        why="R2: quarantined if it was handed over; else it waits for a link",
    )
    fence = "R2: unreachable proves nothing; the fence is frozen (R6)"
    on(
        (REGISTERED, SETTLING),
        LinkDown,
        to=(QUARANTINED, FAILED, RELEASED),
        do=act.link_down,
        why=fence,
    )
    on(REVOKING, LinkDown, to=(QUARANTINED, RELEASED), do=act.link_down, why=fence)
    on(
        QUARANTINED,
        LinkDown,
        to=(QUARANTINED, RELEASED),
        do=act.link_down_later,
        why="R6: unproven while its link was up; another link's end changes nothing",
    )


def _news_rows(table: Table[Consumer]) -> None:
    on, ignore = table.on, table.ignore
    renews = "news of this attempt renews waiting"
    on(REGISTERING, Registered, to=REGISTERED, do=act.registered, why=renews)
    on(REGISTERING, Progress, to=REGISTERED, do=act.registered, why=renews)
    on(REGISTERED, Registered, to=REGISTERED, do=act.registered, why=renews)
    on(REGISTERED, Progress, to=REGISTERED, do=act.registered, why=renews)
    on(
        REVOKING,
        Registered,
        to=REVOKING,
        do=act.draining,
        why="I7: P is alive and drains; it bounds that",
    )
    ignore(REVOKING, Progress, why="late: given up")
    ignore((SETTLING, QUARANTINED), Registered, Progress, why="late: given up or judged")


def _verdict_rows(table: Table[Consumer]) -> None:
    on, ignore = table.on, table.ignore
    ends = (FAILED, RELEASED, SETTLING)
    for status in WAITING:
        on(
            status,
            Complete,
            to=(*ends, DELIVERED),
            do=act.verdict,
            why="R10: exact coverage, each part proven in place",
        )
        on(status, Failed, to=ends, do=act.verdict, why="R8: every handle is closed")
        on(
            status,
            Revoked,
            to=ends,
            do=act.verdict,
            why="unasked, but it closes every handle all the same",
        )
    on(
        REVOKING,
        Complete,
        to=(RELEASED, SETTLING),
        do=act.verdict,
        why="R1: it crossed our REVOKE; nobody waits for it",
    )
    on(REVOKING, Failed, to=(RELEASED, SETTLING), do=act.verdict, why="R1: the verdict is in")
    on(REVOKING, Revoked, to=(RELEASED, SETTLING), do=act.verdict, why="R1: the verdict is in")
    proof = "R14: a verdict of the same incarnation is a proof"
    on(QUARANTINED, Complete, to=(QUARANTINED, RELEASED), do=act.verdict, why=proof)
    on(QUARANTINED, Failed, to=(QUARANTINED, RELEASED), do=act.verdict, why=proof)
    on(QUARANTINED, Revoked, to=(QUARANTINED, RELEASED), do=act.verdict, why=proof)
    ignore(SETTLING, Complete, Failed, Revoked, Unproven, why="one verdict per attempt; repeats")
    posted = "R14: no further WRITE, but the posted ones may land"
    on(
        (*WAITING, REVOKING),
        Unproven,
        to=(QUARANTINED, RELEASED),
        do=act.unproven,
        why=posted,
    )
    ignore(QUARANTINED, Unproven, why="known")


def _wish_rows(table: Table[Consumer]) -> None:
    on, ignore = table.on, table.ignore
    for status in (*WAITING, REVOKING):
        on(status, ArrivalSeen, to=status, do=act.arrival, why="R10: kept as a set")
    on(
        SETTLING,
        ArrivalSeen,
        to=(SETTLING, DELIVERED, FAILED, RELEASED),
        do=act.arrival,
        why="R10: the last arrival settles the verdict",
    )
    on(
        QUARANTINED,
        ArrivalSeen,
        to=(QUARANTINED, RELEASED),
        do=act.arrival,
        why="late arrivals and a kept verdict complete the proof",
    )

    on(
        REGISTERING,
        Withdrawn,
        to=(REVOKING, RELEASED, FAILED),
        do=act.withdraw,
        why="R1: blocks stay until the verdict; never handed over: free at once",
    )
    on(
        REGISTERED,
        Withdrawn,
        to=REVOKING,
        do=act.withdraw,
        why="R1: blocks stay until the verdict",
    )
    ignore(SETTLING, Withdrawn, why="the verdict is in; the request has told its own outcome")
    ignore((REVOKING, QUARANTINED), Withdrawn, why="the outcome is told already")

    proof = "R14: a proof, and nothing less, ends the danger"
    for status in (*WAITING, SETTLING):
        on(status, WriterGone, to=(status, FAILED, RELEASED), do=act.proof, why=proof)
    for status in (REVOKING, QUARANTINED):
        on(status, WriterGone, to=(status, RELEASED), do=act.proof, why=proof)
    on(QUARANTINED, Proven, to=RELEASED, do=act.proof, why=proof)
    ignore((*WAITING, SETTLING, REVOKING), Proven, why="it is about quarantined blocks alone")


def _time_rows(table: Table[Consumer]) -> None:
    on = table.on
    on(
        REGISTERING,
        Tick,
        to=(REGISTERING, REVOKING, FAILED),
        do=act.tick_registering,
        why="I7: resent until answered, for as long as waiting lasts",
    )
    on(
        REGISTERED,
        Tick,
        to=(REGISTERED, REVOKING),
        do=act.tick_registered,
        why="I7: QUERY until the verdict or the waiting deadline",
    )
    on(
        SETTLING,
        Tick,
        to=(SETTLING, QUARANTINED, FAILED, RELEASED),
        do=act.tick_settling,
        why="I7: arrivals may be lost; never DELIVERED by time",
    )
    on(
        REVOKING,
        Tick,
        to=(REVOKING, RELEASED),
        do=act.tick_revoking,
        why="I7: resent; unanswered for lease + bound, the link is suspect",
    )
    on(
        QUARANTINED,
        Tick,
        to=(QUARANTINED, RELEASED),
        do=act.tick_quarantined,
        why="R6: strictly after the fence, under a known bound",
    )


CONSUMER = _build()
"""The consumer's table, frozen."""

"""The request machine: one attempt of one transfer at the consumer's engine, all ranks (R12).

Theory of operation
-------------------
An attempt has members, one per pair of consumer and producer rank, each a ``consumer`` machine.
This machine folds their reports into the engine's: DELIVERED only when all members are; the first
failure is the attempt's, and makes the siblings REVOKE; the blocks are released only when every
member is freed. Outcome and release are two reports, each made exactly once per attempt (I3).

It is also where an attempt may turn into another one. After a failure worth repeating it waits out
a backoff in RETRYING and then says ``RetryDue``; taken back by the engine it waits in PREEMPTED to
be re-admitted. Both hand over to a *new* attempt with fresh blocks and end here: the blocks of this
one follow on their own, and may stay quarantined long after the request has gone on.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import frozen

from .copies import copier
from .effects import (
    BlocksReleased,
    Delivered,
    Effect,
    Member,
    MemberFreed,
    MemberOutcome,
    MemberTold,
    NotDelivered,
    RetryDue,
    WithdrawMember,
)
from .events import Cancelled, Readmitted, TakenBack, Tick
from .ids import FOREVER, Instant, TransferId
from .messages import Reason
from .table import Result, Rules, Table

__all__ = ["REQUEST", "Request", "RequestStatus", "gather", "is_terminal"]


class RequestStatus(StrEnum):
    """Where an attempt stands at the consumer's engine."""

    RECEIVING = "request.receiving"
    RETRYING = "request.retrying"
    PREEMPTED = "request.preempted"
    RELEASING = "request.releasing"
    DELIVERED = "request.delivered"
    FAILED = "request.failed"
    RELEASED = "request.released"


RECEIVING, RETRYING, PREEMPTED, RELEASING, DELIVERED, FAILED, RELEASED = RequestStatus
TERMINAL = (DELIVERED, FAILED, RELEASED)

RETRYABLE = frozenset(
    {
        Reason.LINK_LOST,
        Reason.WRITE,
        Reason.STALLED,
        Reason.UNPROVEN,
        Reason.UNKNOWN,
        Reason.WRITER_GONE,
    }
)
"""Failures that another attempt at the same producer may not meet again."""


@frozen
class Request:
    """One attempt's whole state at the engine. Build with `gather`.

    Attributes:
        members: All members, ascending.
        delivered: Those whose KV is in place.
        freed: Those whose blocks nobody can write any more.
        told: The engine knows the outcome.
        ends_as: The terminal status it will have once all members are freed.
        released: The engine knows that the blocks are its own again.
        failures: Failed attempts of this transfer before this one.
        retry_at: When a new attempt is due.
    """

    status: RequestStatus
    transfer: TransferId
    attempt: int
    members: tuple[Member, ...]
    delivered: tuple[Member, ...]
    freed: tuple[Member, ...]
    told: bool
    ends_as: RequestStatus
    released: bool
    failures: int
    retry_at: Instant

    @property
    def next_deadline(self) -> Instant:
        """When a Tick is due; FOREVER if never."""
        return self.retry_at


# What every action copies its state with: `copies.replace`, made for this class alone.
if TYPE_CHECKING:
    from attrs import evolve as replace
else:
    replace = copier(Request)


def is_terminal(state: Request) -> bool:
    """Whether both reports are made and the machine may be forgotten."""
    return state.status in TERMINAL


def gather(
    transfer: TransferId, attempt: int, members: tuple[Member, ...], failures: int
) -> Request:
    """A new attempt that waits for all of `members`."""
    return Request(
        RECEIVING,
        transfer,
        attempt,
        tuple(sorted(members)),
        (),
        (),
        False,
        DELIVERED,
        False,
        failures,
        FOREVER,
    )


# -- pieces of actions


def _member(report: MemberTold | MemberFreed) -> Member:
    return Member(report.attempt.consumer_rank, report.attempt.producer_rank)


def _withdraw_others(
    state: Request, reason: Reason, but: Member | None = None
) -> tuple[Effect, ...]:
    """R12: attempts end at the engine; every member not freed yet is revoked."""
    return tuple(
        WithdrawMember(member, reason)
        for member in state.members
        if member != but and member not in state.freed
    )


def _settle(state: Request) -> Result[Request]:
    """R12: blocks are free only when every member is; then an attempt may end."""
    effects: tuple[Effect, ...] = ()
    if len(state.freed) == len(state.members) and not state.released:
        state = replace(state, released=True)
        effects = (BlocksReleased(state.transfer, state.attempt),)
    if state.released and state.status is RELEASING:
        state = replace(state, status=state.ends_as)
    return state, effects


# -- actions


def _told(state: Request, event: MemberTold, now: Instant, rules: Rules) -> Result[Request]:
    member = _member(event)
    if event.outcome is MemberOutcome.DELIVERED:
        state = replace(state, delivered=tuple(sorted({*state.delivered, member})))
        if len(state.delivered) < len(state.members):
            return state, ()
        state = replace(state, status=RELEASING, told=True, ends_as=DELIVERED)
        return state, (Delivered(state.transfer, state.attempt),)
    reason = event.reason or Reason.UNKNOWN
    retry = reason in RETRYABLE and state.failures + 1 < rules.policy.attempts
    effects: tuple[Effect, ...] = (
        NotDelivered(state.transfer, state.attempt, reason, retry),
        *_withdraw_others(state, Reason.SIBLING, but=member),
    )
    state = replace(state, status=RELEASING, told=True, ends_as=FAILED)
    if retry:
        wait = rules.policy.retry_backoff << min(state.failures, 16)
        state = replace(state, status=RETRYING, retry_at=Instant(now + wait))
    return state, effects


def _freed(state: Request, event: MemberFreed, now: Instant, rules: Rules) -> Result[Request]:
    return _settle(replace(state, freed=tuple(sorted({*state.freed, _member(event)}))))


def _cancelled(state: Request, event: Cancelled, now: Instant, rules: Rules) -> Result[Request]:
    effects = (
        NotDelivered(state.transfer, state.attempt, event.reason, False),
        *_withdraw_others(state, event.reason),
    )
    return replace(state, status=RELEASING, told=True, ends_as=RELEASED), effects


def _taken_back(state: Request, event: TakenBack, now: Instant, rules: Rules) -> Result[Request]:
    effects = (
        NotDelivered(state.transfer, state.attempt, Reason.PREEMPTED, False),
        *_withdraw_others(state, Reason.PREEMPTED),
    )
    return replace(state, status=PREEMPTED, told=True, ends_as=RELEASED), effects


def _give_up(state: Request, event: Cancelled, now: Instant, rules: Rules) -> Result[Request]:
    return _settle(replace(state, status=RELEASING, retry_at=FOREVER, ends_as=RELEASED))


def _hand_over(
    state: Request, event: Readmitted | Tick, now: Instant, rules: Rules
) -> Result[Request]:
    """A new attempt may be made; this one only waits for its blocks any more."""
    if isinstance(event, Tick) and now < state.retry_at:
        return state, ()
    state, effects = _settle(replace(state, status=RELEASING, retry_at=FOREVER))
    return state, (RetryDue(state.transfer, state.attempt), *effects)


EVENTS = (MemberTold, MemberFreed, Cancelled, TakenBack, Readmitted, Tick)


def _build() -> Table[Request]:
    table: Table[Request] = Table("request", RequestStatus, EVENTS)
    on, ignore = table.on, table.ignore

    on(
        RECEIVING,
        MemberTold,
        to=(RECEIVING, RETRYING, RELEASING),
        do=_told,
        why="R12: delivered iff all members are; the first failure is the attempt's",
    )
    ignore((RETRYING, PREEMPTED, RELEASING), MemberTold, why="I3: one outcome per attempt")
    on(RECEIVING, MemberFreed, to=RECEIVING, do=_freed, why="R12: free when every member is")
    on(
        (RETRYING,),
        MemberFreed,
        to=RETRYING,
        do=_freed,
        why="the blocks need not wait for the retry",
    )
    on((PREEMPTED,), MemberFreed, to=PREEMPTED, do=_freed, why="this is what the engine waits for")
    on(
        RELEASING,
        MemberFreed,
        to=(RELEASING, *TERMINAL),
        do=_freed,
        why="R12: free when every member is",
    )
    on(RECEIVING, Cancelled, to=RELEASING, do=_cancelled, why="told at once, released on proof")
    on(
        (RETRYING, PREEMPTED),
        Cancelled,
        to=(RELEASING, RELEASED),
        do=_give_up,
        why="no new attempt for a request nobody wants",
    )
    ignore(RELEASING, Cancelled, why="I3: the outcome is told already")
    on(RECEIVING, TakenBack, to=PREEMPTED, do=_taken_back, why="R1: taken back through REVOKING")
    ignore((RETRYING, PREEMPTED, RELEASING), TakenBack, why="no blocks are wanted any more")
    on(
        PREEMPTED,
        Readmitted,
        to=(RELEASING, RELEASED),
        do=_hand_over,
        why="R9: a new attempt, never the old one again",
    )
    ignore((RECEIVING, RETRYING, RELEASING), Readmitted, why="it was not preempted")
    on(RETRYING, Tick, to=(RETRYING, RELEASING, FAILED), do=_hand_over, why="the backoff is over")
    ignore((RECEIVING, PREEMPTED, RELEASING), Tick, why="its members keep the time")
    ignore(TERMINAL, *EVENTS, why="I3: terminal states absorb")
    return table.freeze()


REQUEST = _build()
"""The request's table, frozen."""

"""The consumer machine: one registration at one decode rank, towards one prefill rank.

Theory of operation
-------------------
The consumer has offered blocks. From the moment REGISTER may have left until a proof says otherwise,
somebody may write into them, and this machine exists to know when that has ended. It makes two
reports, each exactly once (I3):

* ``MemberTold``, the outcome, as soon as it is known. No client waits for a fence.
* ``MemberFreed``, when nothing can write into the blocks any more. No fence is cut short for a client.

Five inputs move it: the engine's wish (`Withdrawn`), the producer's messages, arrivals, its link, and
time. The verdicts COMPLETE, FAILED and REVOKED all say "no further WRITE, every handle closed"; where
the transport's DONE does not mean visible, each passes through SETTLING until the arrivals of the parts
it names are in. UNPROVEN and a lost link lead to QUARANTINED, which only a proof leaves: a later
verdict of the same incarnation, a fence that passed under a known bound, the writer's certain death, or
the operator's word.

The outcome is told on the way into REVOKING and QUARANTINED, so that a COMPLETE which crosses a
REVOKE frees and never delivers.

Retry and preemption belong to the whole attempt, over all ranks: see ``request``.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from . import rules as rule
from .effects import (
    Effect,
    LinkDown,
    LinkUp,
    MemberFreed,
    MemberOutcome,
    MemberTold,
    Send,
    SuspectLink,
)
from .events import ArrivalSeen, Proven, Tick, Withdrawn, WriterGone
from .ids import FOREVER, AttemptId, Epoch, Instant, Worker
from .messages import (
    Complete,
    Failed,
    Progress,
    Query,
    Reason,
    Received,
    Register,
    Registered,
    Revoke,
    Revoked,
    Unproven,
)
from .table import Result, Rules, Table, replace

__all__ = ["CONSUMER", "Consumer", "ConsumerStatus", "awaits_arrivals", "is_terminal", "offer"]


class ConsumerStatus(StrEnum):
    """Where a registration stands at the consumer."""

    REGISTERING = "consumer.registering"
    REGISTERED = "consumer.registered"
    SETTLING = "consumer.settling"
    REVOKING = "consumer.revoking"
    QUARANTINED = "consumer.quarantined"
    DELIVERED = "consumer.delivered"
    FAILED = "consumer.failed"
    RELEASED = "consumer.released"


REGISTERING, REGISTERED, SETTLING, REVOKING, QUARANTINED, DELIVERED, FAILED, RELEASED = (
    ConsumerStatus
)
WAITING = (REGISTERING, REGISTERED)
EXPOSED = (REGISTERING, REGISTERED, SETTLING, REVOKING, QUARANTINED)
TERMINAL = (DELIVERED, FAILED, RELEASED)

KeptVerdict = Complete | Failed | Revoked


@frozen
class Consumer:
    """One registration's whole state. Build with `offer`.

    Attributes:
        register: What is, or will be, offered; never changes.
        epoch: The link it was handed to; None while it never was.
        producer: The worker it was handed to; only this incarnation can answer for it (R14).
        fence: Frozen when that link ended (R6); None while it has not, or where it never granted.
        told: The outcome has been told.
        arrived: Numbers of the parts whose arrivals are in, ascending.
        verdict: The verdict that waits for arrivals.
        timer_at: When to send again.
        deadline_at: When to stop waiting.
    """

    status: ConsumerStatus
    register: Register
    epoch: Epoch | None
    producer: Worker | None
    fence: Instant | None
    told: bool
    arrived: tuple[int, ...]
    verdict: KeptVerdict | None
    timer_at: Instant
    deadline_at: Instant

    @property
    def attempt(self) -> AttemptId:
        """The registration's full name."""
        return self.register.attempt

    @property
    def exposed(self) -> bool:
        """Whether somebody may write: it was handed to a link, and there are bytes to write."""
        return self.epoch is not None and self.register.end > self.register.start

    @property
    def next_deadline(self) -> Instant:
        """When a Tick is due; FOREVER if never."""
        return min(self.timer_at, self.deadline_at)


def is_terminal(state: Consumer) -> bool:
    """Whether both reports are made and the machine may be forgotten."""
    return state.status in TERMINAL


def awaits_arrivals(state: Consumer) -> bool:
    """Whether a verdict is in whose arrivals are not."""
    return state.verdict is not None and state.status in (SETTLING, QUARANTINED)


def offer(register: Register, now: Instant, rules: Rules) -> Result[Consumer]:
    """A new registration, not handed to any link yet.

    With nothing to transfer the outcome is told at once; REGISTER still goes out, so that the producer
    can free its blocks.
    """
    deadline = Instant(now + rules.policy.connect)
    state = Consumer(REGISTERING, register, None, None, None, False, (), None, FOREVER, deadline)
    if register.start == register.end:
        return _tell(state, MemberOutcome.DELIVERED, None)
    return state, ()


# -- pieces of actions


def _tell(state: Consumer, outcome: MemberOutcome, reason: Reason | None) -> Result[Consumer]:
    if state.told:
        return state, ()
    return replace(state, told=True), (MemberTold(state.attempt, outcome, reason),)


def _end(
    state: Consumer, status: ConsumerStatus, outcome: MemberOutcome, reason: Reason | None
) -> Result[Consumer]:
    """Terminal: tell what is still untold, then give the blocks back."""
    state, told = _tell(state, outcome, reason)
    state = replace(state, status=status, timer_at=FOREVER, deadline_at=FOREVER)
    return state, (*told, MemberFreed(state.attempt))


def _revoke(state: Consumer, now: Instant, rules: Rules, reason: Reason) -> Result[Consumer]:
    """R1: the blocks stay until the verdict; the engine learns the outcome now."""
    withdrawn = reason in (Reason.CANCELLED, Reason.PREEMPTED, Reason.SIBLING, Reason.CLOSED)
    outcome = MemberOutcome.WITHDRAWN if withdrawn else MemberOutcome.FAILED
    if state.epoch is None:
        return _end(state, RELEASED if withdrawn else FAILED, outcome, reason)
    state, told = _tell(state, outcome, reason)
    state = replace(
        state,
        status=REVOKING,
        timer_at=Instant(now + rules.policy.resend),
        deadline_at=_answer_by(now, rules),
    )
    return state, (*told, Send(Revoke(state.attempt)))


def _quarantine(state: Consumer, reason: Reason) -> Result[Consumer]:
    """R2: unreachable or unproven; told as failed, kept until a proof."""
    state, told = _tell(state, MemberOutcome.FAILED, reason)
    at = FOREVER if state.fence is None else Instant(state.fence + 1)
    return replace(state, status=QUARANTINED, timer_at=FOREVER, deadline_at=at), told


def _judge(state: Consumer, verdict: KeptVerdict, now: Instant, rules: Rules) -> Result[Consumer]:
    """A verdict that closes every handle is in: finish, or settle until its arrivals are in."""
    state = replace(state, verdict=verdict)
    if not rule.proven(verdict.parts, state.arrived, rules.capabilities):
        if state.status is QUARANTINED:
            return state, ()
        wait = max(rules.policy.settle, rules.capabilities.write_bound or 0)
        told: tuple[Effect, ...] = ()
        if not isinstance(verdict, Complete):
            state, told = _tell(state, MemberOutcome.FAILED, _reason(verdict))
        state = replace(state, status=SETTLING, timer_at=FOREVER, deadline_at=Instant(now + wait))
        return state, told
    received = (Send(Received(state.attempt)),)
    register = state.register
    if isinstance(verdict, Complete) and not state.told:
        if rule.covers(verdict.parts, register.start, register.end):
            state, effects = _end(state, DELIVERED, MemberOutcome.DELIVERED, None)
        else:
            state, effects = _end(state, FAILED, MemberOutcome.FAILED, Reason.COVERAGE)
    else:
        status = RELEASED if state.told else FAILED
        state, effects = _end(state, status, MemberOutcome.FAILED, _reason(verdict))
    return state, (*effects, *received)


def _reason(verdict: KeptVerdict) -> Reason:
    return verdict.reason if isinstance(verdict, Failed) else Reason.UNKNOWN


# -- actions


def _link_up(state: Consumer, event: LinkUp, now: Instant, rules: Rules) -> Result[Consumer]:
    if state.epoch is not None:
        return state, ()
    policy = rules.policy
    state = replace(
        state,
        epoch=event.epoch,
        producer=event.peer,
        timer_at=Instant(now + policy.resend),
        deadline_at=Instant(now + policy.waiting),
    )
    return state, (Send(state.register),)


def _link_back(state: Consumer, event: LinkUp, now: Instant, rules: Rules) -> Result[Consumer]:
    """R14: another incarnation of the producer cannot answer for this one."""
    if event.peer != state.producer:
        return state, ()
    return _revoke(state, now, rules, Reason.LINK_LOST)


def _link_down(state: Consumer, event: LinkDown, now: Instant, rules: Rules) -> Result[Consumer]:
    """R6: the fence is that of the attempt's own link, frozen here. Never granted: never written."""
    if state.epoch is None:
        return state, ()
    if event.epoch == state.epoch:
        if event.fence is None or not state.exposed:
            told_as = RELEASED if state.told else FAILED
            return _end(state, told_as, MemberOutcome.FAILED, Reason.LINK_LOST)
        state = replace(state, fence=event.fence)
    return _quarantine(state, Reason.LINK_LOST)


def _registered(
    state: Consumer, event: Registered | Progress, now: Instant, rules: Rules
) -> Result[Consumer]:
    policy = rules.policy
    return (
        replace(
            state,
            status=REGISTERED,
            timer_at=Instant(now + policy.query),
            deadline_at=Instant(now + policy.waiting),
        ),
        (),
    )


def _draining(state: Consumer, event: Registered, now: Instant, rules: Rules) -> Result[Consumer]:
    return replace(state, deadline_at=_answer_by(now, rules)), ()


def _answer_by(now: Instant, rules: Rules) -> Instant:
    """Until when a REVOKE must be answered: lease + write_bound, else the link is suspect."""
    return Instant(now + rules.policy.lease + (rules.capabilities.write_bound or 0))


def _verdict(state: Consumer, event: KeptVerdict, now: Instant, rules: Rules) -> Result[Consumer]:
    return _judge(state, event, now, rules)


def _unproven(state: Consumer, event: Unproven, now: Instant, rules: Rules) -> Result[Consumer]:
    return _quarantine(state, Reason.UNPROVEN)


def _arrival(state: Consumer, event: ArrivalSeen, now: Instant, rules: Rules) -> Result[Consumer]:
    """R10: arrivals are a set of parts, and only the producer that was told the token makes them."""
    if event.token != state.register.arrival_token or event.part in state.arrived:
        return state, ()
    state = replace(state, arrived=tuple(sorted((*state.arrived, event.part))))
    if state.verdict is None or state.status in (REVOKING, *WAITING):
        return state, ()
    return _judge(state, state.verdict, now, rules)


def _withdraw(state: Consumer, event: Withdrawn, now: Instant, rules: Rules) -> Result[Consumer]:
    return _revoke(state, now, rules, event.reason)


def _withdraw_settling(
    state: Consumer, event: Withdrawn, now: Instant, rules: Rules
) -> Result[Consumer]:
    """The verdict is in already; remember only that nobody wants it."""
    return _tell(state, MemberOutcome.WITHDRAWN, event.reason)


def _proof(
    state: Consumer, event: WriterGone | Proven, now: Instant, rules: Rules
) -> Result[Consumer]:
    if isinstance(event, WriterGone) and event.worker != state.producer:
        return state, ()
    if state.status is not QUARANTINED and isinstance(event, Proven):
        return state, ()
    status = RELEASED if state.told else FAILED
    return _end(state, status, MemberOutcome.FAILED, Reason.WRITER_GONE)


def _tick_registering(state: Consumer, event: Tick, now: Instant, rules: Rules) -> Result[Consumer]:
    if now >= state.deadline_at:
        reason = Reason.UNREACHABLE if state.epoch is None else Reason.WAITED
        return _revoke(state, now, rules, reason)
    if now >= state.timer_at:
        timer = Instant(now + rules.policy.resend)
        return replace(state, timer_at=timer), (Send(state.register),)
    return state, ()


def _tick_registered(state: Consumer, event: Tick, now: Instant, rules: Rules) -> Result[Consumer]:
    if now >= state.deadline_at:
        return _revoke(state, now, rules, Reason.WAITED)
    if now >= state.timer_at:
        timer = Instant(now + rules.policy.query)
        return replace(state, timer_at=timer), (Send(Query(state.attempt)),)
    return state, ()


def _tick_settling(state: Consumer, event: Tick, now: Instant, rules: Rules) -> Result[Consumer]:
    """Every handle was closed when the verdict left; under a known bound their bytes are over now."""
    if now < state.deadline_at:
        return state, ()
    if rules.capabilities.write_bound is None:
        return _quarantine(state, Reason.UNPROVEN)
    status = RELEASED if state.told else FAILED
    state, effects = _end(state, status, MemberOutcome.FAILED, Reason.UNPROVEN)
    return state, (*effects, Send(Received(state.attempt)))


def _tick_revoking(state: Consumer, event: Tick, now: Instant, rules: Rules) -> Result[Consumer]:
    if rule.fence_passed(now, state.fence, rules.capabilities.write_bound):
        return _end(state, RELEASED, MemberOutcome.FAILED, Reason.LINK_LOST)
    if now >= state.deadline_at:
        return replace(state, deadline_at=FOREVER, timer_at=FOREVER), (SuspectLink(state.attempt),)
    if now >= state.timer_at:
        timer = Instant(now + rules.policy.resend)
        return replace(state, timer_at=timer), (Send(Revoke(state.attempt)),)
    return state, ()


def _tick_quarantined(state: Consumer, event: Tick, now: Instant, rules: Rules) -> Result[Consumer]:
    if rule.fence_passed(now, state.fence, rules.capabilities.write_bound):
        return _end(state, RELEASED, MemberOutcome.FAILED, Reason.LINK_LOST)
    if now >= state.deadline_at:
        return replace(state, deadline_at=FOREVER), ()
    return state, ()


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
    on, ignore = table.on, table.ignore

    on(REGISTERING, LinkUp, to=REGISTERING, do=_link_up, why="the link is there: REGISTER goes out")
    ignore((REGISTERED, SETTLING, REVOKING), LinkUp, why="a newer link ends the older one first")
    on(
        QUARANTINED,
        LinkUp,
        to=(QUARANTINED, REVOKING),
        do=_link_back,
        why="R11: the same incarnation remembers the attempt and can be asked",
    )
    on(
        REGISTERING,
        LinkDown,
        to=(REGISTERING, QUARANTINED, FAILED, RELEASED),
        do=_link_down,
        why="R2: quarantined if it was handed over; else it waits for a link",
    )
    on(
        (REGISTERED, SETTLING, REVOKING),
        LinkDown,
        to=(QUARANTINED, FAILED, RELEASED),
        do=_link_down,
        why="R2: unreachable proves nothing; the fence is frozen (R6)",
    )
    ignore(QUARANTINED, LinkDown, why="R6: its own link has ended already")

    on(
        WAITING,
        Registered,
        to=REGISTERED,
        do=_registered,
        why="news of this attempt renews waiting",
    )
    on(WAITING, Progress, to=REGISTERED, do=_registered, why="news of this attempt renews waiting")
    on(
        REVOKING,
        Registered,
        to=REVOKING,
        do=_draining,
        why="I7: P is alive and drains; it bounds that",
    )
    ignore(REVOKING, Progress, why="late: given up")
    ignore((SETTLING, QUARANTINED), Registered, Progress, why="late: given up or judged")

    on(
        WAITING,
        Complete,
        to=(DELIVERED, FAILED, RELEASED, SETTLING),
        do=_verdict,
        why="R10: exact coverage, each part proven in place",
    )
    on(
        WAITING,
        Failed,
        to=(FAILED, RELEASED, SETTLING),
        do=_verdict,
        why="R8: every handle is closed",
    )
    on(
        WAITING,
        Revoked,
        to=(FAILED, RELEASED, SETTLING),
        do=_verdict,
        why="unasked, but it closes every handle all the same",
    )
    on(
        REVOKING,
        Complete,
        to=(RELEASED, SETTLING),
        do=_verdict,
        why="R1: it crossed our REVOKE; nobody waits for it",
    )
    on(REVOKING, Failed, to=(RELEASED, SETTLING), do=_verdict, why="R1: the verdict is in")
    on(REVOKING, Revoked, to=(RELEASED, SETTLING), do=_verdict, why="R1: the verdict is in")
    proof = "R14: a verdict of the same incarnation is a proof"
    on(QUARANTINED, Complete, to=(QUARANTINED, RELEASED), do=_verdict, why=proof)
    on(QUARANTINED, Failed, to=(QUARANTINED, RELEASED), do=_verdict, why=proof)
    on(QUARANTINED, Revoked, to=(QUARANTINED, RELEASED), do=_verdict, why=proof)
    ignore(SETTLING, Complete, Failed, Revoked, Unproven, why="one verdict per attempt; repeats")
    on(
        (*WAITING, REVOKING),
        Unproven,
        to=QUARANTINED,
        do=_unproven,
        why="R14: no further WRITE, but the posted ones may land",
    )
    ignore(QUARANTINED, Unproven, why="known")

    on(
        (*WAITING, REVOKING),
        ArrivalSeen,
        to=(*WAITING, REVOKING),
        do=_arrival,
        why="R10: kept as a set",
    )
    on(
        SETTLING,
        ArrivalSeen,
        to=(SETTLING, DELIVERED, FAILED, RELEASED),
        do=_arrival,
        why="R10: the last arrival settles the verdict",
    )
    on(
        QUARANTINED,
        ArrivalSeen,
        to=(QUARANTINED, RELEASED),
        do=_arrival,
        why="late arrivals and a kept verdict complete the proof",
    )

    on(
        WAITING,
        Withdrawn,
        to=(REVOKING, RELEASED, FAILED),
        do=_withdraw,
        why="R1: blocks stay until the verdict; never handed over: free at once",
    )
    on(SETTLING, Withdrawn, to=SETTLING, do=_withdraw_settling, why="a cancel is remembered")
    ignore((REVOKING, QUARANTINED), Withdrawn, why="the outcome is told already")

    proof = "R14: a proof, and nothing less, ends the danger"
    on(EXPOSED, WriterGone, to=(*EXPOSED, FAILED, RELEASED), do=_proof, why=proof)
    on(EXPOSED, Proven, to=(*EXPOSED, FAILED, RELEASED), do=_proof, why=proof)

    on(
        REGISTERING,
        Tick,
        to=(REGISTERING, REVOKING, FAILED, RELEASED),
        do=_tick_registering,
        why="I7: resent until answered, for as long as waiting lasts",
    )
    on(
        REGISTERED,
        Tick,
        to=(REGISTERED, REVOKING, FAILED),
        do=_tick_registered,
        why="I7: QUERY until the verdict or the waiting deadline",
    )
    on(
        SETTLING,
        Tick,
        to=(SETTLING, QUARANTINED, FAILED, RELEASED),
        do=_tick_settling,
        why="I7: arrivals may be lost; never DELIVERED by time",
    )
    on(
        REVOKING,
        Tick,
        to=(REVOKING, RELEASED),
        do=_tick_revoking,
        why="I7: resent; unanswered for lease + bound, the link is suspect",
    )
    on(
        QUARANTINED,
        Tick,
        to=(QUARANTINED, RELEASED),
        do=_tick_quarantined,
        why="R6: strictly after the fence, under a known bound",
    )
    ignore(TERMINAL, *EVENTS, why="I3: terminal states absorb")
    return table.freeze()


CONSUMER = _build()
"""The consumer's table, frozen."""

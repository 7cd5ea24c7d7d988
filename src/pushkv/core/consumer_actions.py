"""What the consumer machine does: one pure function per kind of step, and the pieces they share."""

from __future__ import annotations

from . import rules as rule
from .consumer import (
    DELIVERED,
    FAILED,
    QUARANTINED,
    REGISTERED,
    REGISTERING,
    RELEASED,
    REVOKING,
    SETTLING,
    WAITING,
    Consumer,
    ConsumerStatus,
    KeptVerdict,
    replace,
)
from .effects import (
    Counted,
    LinkDown,
    LinkUp,
    MemberFreed,
    MemberOutcome,
    MemberTold,
    Send,
    SuspectLink,
)
from .events import ArrivalSeen, Proven, Tick, Withdrawn, WriterGone
from .ids import FOREVER, Instant
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
    Unproven,
)
from .table import Result, Rules

# -- pieces of actions


def _report(
    state: Consumer, outcome: MemberOutcome, reason: Reason | None
) -> tuple[MemberTold, ...]:
    """I3: the outcome, where it is not told yet. Whoever returns it sets `told`."""
    return () if state.told else (MemberTold(state.attempt, outcome, reason),)


def _end(
    state: Consumer,
    status: ConsumerStatus,
    outcome: MemberOutcome,
    reason: Reason | None,
    verdict: KeptVerdict | None = None,
) -> Result[Consumer]:
    """Terminal: tell what is still untold, then give the blocks back."""
    after = replace(
        state,
        status=status,
        told=True,
        verdict=verdict or state.verdict,
        timer_at=FOREVER,
        deadline_at=FOREVER,
    )
    return after, (*_report(state, outcome, reason), MemberFreed(state.attempt))


def _revoke(state: Consumer, now: Instant, rules: Rules, reason: Reason) -> Result[Consumer]:
    """R1: the blocks stay until the verdict; the engine learns the outcome now."""
    withdrawn = reason in (Reason.CANCELLED, Reason.PREEMPTED, Reason.SIBLING, Reason.CLOSED)
    outcome = MemberOutcome.WITHDRAWN if withdrawn else MemberOutcome.FAILED
    if state.epoch is None:
        return _end(state, RELEASED if withdrawn else FAILED, outcome, reason)
    after = replace(
        state,
        status=REVOKING,
        told=True,
        final=state.final or reason is Reason.CANCELLED,
        timer_at=Instant(now + rules.policy.resend),
        deadline_at=_answer_by(now, rules),
    )
    return after, (*_report(state, outcome, reason), Send(Revoke(state.attempt, after.final)))


def _quarantine(state: Consumer, reason: Reason) -> Result[Consumer]:
    """R2: unreachable or unproven; told as failed, kept until a proof.

    With nothing to write there is nothing to prove.
    """
    if not state.exposed:
        return _end(state, RELEASED if state.told else FAILED, MemberOutcome.FAILED, reason)
    at = FOREVER if state.fence is None else Instant(state.fence + 1)
    after = replace(state, status=QUARANTINED, told=True, timer_at=FOREVER, deadline_at=at)
    return after, _report(state, MemberOutcome.FAILED, reason)


def _judge(state: Consumer, verdict: KeptVerdict, now: Instant, rules: Rules) -> Result[Consumer]:
    """A verdict that closes every handle is in: finish, or settle until its arrivals are in."""
    if not rule.proven(verdict.parts, state.arrived, rules.capabilities):
        if state.status is QUARANTINED:
            return replace(state, verdict=verdict), ()
        return _settle(state, verdict, now, rules)
    register = state.register
    if not isinstance(verdict, Complete) or state.told:
        status = RELEASED if state.told else FAILED
        after, effects = _end(state, status, MemberOutcome.FAILED, _reason(verdict), verdict)
    elif rule.covers(verdict.parts, register.start, register.end):
        after, effects = _end(state, DELIVERED, MemberOutcome.DELIVERED, None, verdict)
    else:
        after, effects = _end(state, FAILED, MemberOutcome.FAILED, Reason.COVERAGE, verdict)
    return after, (*effects, Send(Received(state.attempt)))


def _settle(state: Consumer, verdict: KeptVerdict, now: Instant, rules: Rules) -> Result[Consumer]:
    """R14: a failure is told at once; COMPLETE delivers only when what it names has arrived."""
    policy = rules.policy
    until = rule.settled_at(now, policy.settle, rules.capabilities.write_bound, policy.drift_ppm)
    failed = not isinstance(verdict, Complete)
    after = replace(
        state,
        status=SETTLING,
        told=state.told or failed,
        verdict=verdict,
        timer_at=FOREVER,
        deadline_at=until,
    )
    return after, _report(state, MemberOutcome.FAILED, _reason(verdict)) if failed else ()


def _reason(verdict: KeptVerdict) -> Reason:
    return verdict.reason if isinstance(verdict, Failed) else Reason.UNKNOWN


# -- actions


def offer(register: Register, now: Instant, rules: Rules) -> Result[Consumer]:
    """A new registration, not handed to any link yet.

    With nothing to transfer the outcome is told at once; REGISTER still goes out, so that the
    producer can free its blocks.
    """
    deadline = Instant(now + rules.policy.connect)
    empty = register.start == register.end
    state = Consumer(
        status=REGISTERING,
        register=register,
        epoch=None,
        producer=None,
        fence=None,
        told=empty,
        final=False,
        arrived=(),
        verdict=None,
        timer_at=FOREVER,
        deadline_at=deadline,
    )
    told = MemberTold(register.attempt, MemberOutcome.DELIVERED, None)
    return state, (told,) if empty else ()


def link_up(state: Consumer, event: LinkUp, now: Instant, rules: Rules) -> Result[Consumer]:
    """The link is there: REGISTER goes out, and from now on the blocks are exposed."""
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


def link_back(state: Consumer, event: LinkUp, now: Instant, rules: Rules) -> Result[Consumer]:
    """R14: another incarnation of the producer cannot answer for this one."""
    if event.peer != state.producer:
        return state, ()
    return _revoke(state, now, rules, Reason.LINK_LOST)


def link_down_registering(
    state: Consumer, event: LinkDown, now: Instant, rules: Rules
) -> Result[Consumer]:
    """What was not handed to any link waits for one."""
    if state.epoch is None:
        return state, ()
    return link_down(state, event, now, rules)


def link_down(state: Consumer, event: LinkDown, now: Instant, rules: Rules) -> Result[Consumer]:
    """R6: the fence of the attempt's own link, frozen here. Never granted: never written."""
    if event.epoch == state.epoch:
        if event.fence is None:
            told_as = RELEASED if state.told else FAILED
            return _end(state, told_as, MemberOutcome.FAILED, Reason.LINK_LOST)
        state = replace(state, fence=event.fence)
    return _quarantine(state, Reason.LINK_LOST)


def link_down_later(
    state: Consumer, event: LinkDown, now: Instant, rules: Rules
) -> Result[Consumer]:
    """R6: quarantined as unproven while its own link was up, it gets its fence now."""
    if event.epoch != state.epoch:
        return state, ()
    return link_down(state, event, now, rules)


def registered(
    state: Consumer, event: Registered | Progress, now: Instant, rules: Rules
) -> Result[Consumer]:
    """News of this attempt renews waiting; the link's being up does not."""
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


def draining(state: Consumer, event: Registered, now: Instant, rules: Rules) -> Result[Consumer]:
    """The producer is alive and drains: it bounds that, so the link is not suspect."""
    return replace(state, deadline_at=_answer_by(now, rules)), ()


def _answer_by(now: Instant, rules: Rules) -> Instant:
    """Until when a REVOKE must be answered: lease + write_bound, else the link is suspect."""
    return Instant(now + rules.policy.lease + (rules.capabilities.write_bound or 0))


def verdict(state: Consumer, event: KeptVerdict, now: Instant, rules: Rules) -> Result[Consumer]:
    """R8: no further WRITE, every handle is closed."""
    return _judge(state, event, now, rules)


def unproven(state: Consumer, event: Unproven, now: Instant, rules: Rules) -> Result[Consumer]:
    """R14: no further WRITE, but the posted ones may land."""
    return _quarantine(state, Reason.UNPROVEN)


def arrival(state: Consumer, event: ArrivalSeen, now: Instant, rules: Rules) -> Result[Consumer]:
    """R10: arrivals are a set of parts, made only by the producer that was told the token."""
    if event.token != state.register.arrival_token:
        return state, (Counted("forged_arrival"),)
    if event.part in state.arrived:
        return state, (Counted("repeated_arrival"),)
    state = replace(state, arrived=tuple(sorted((*state.arrived, event.part))))
    if state.verdict is None or state.status in (REVOKING, *WAITING):
        return state, ()
    return _judge(state, state.verdict, now, rules)


def withdraw(state: Consumer, event: Withdrawn, now: Instant, rules: Rules) -> Result[Consumer]:
    """R1: ask for the blocks; they stay until the verdict."""
    return _revoke(state, now, rules, event.reason)


def proof(
    state: Consumer, event: WriterGone | Proven, now: Instant, rules: Rules
) -> Result[Consumer]:
    """R14: nothing can write any more: fail closed, and give the blocks back."""
    if isinstance(event, WriterGone) and event.worker != state.producer:
        return state, ()
    status = RELEASED if state.told else FAILED
    return _end(state, status, MemberOutcome.FAILED, Reason.WRITER_GONE)


def tick_registering(state: Consumer, event: Tick, now: Instant, rules: Rules) -> Result[Consumer]:
    """I7: REGISTER is resent until answered, for as long as waiting lasts."""
    if now >= state.deadline_at:
        reason = Reason.UNREACHABLE if state.epoch is None else Reason.WAITED
        return _revoke(state, now, rules, reason)
    if now >= state.timer_at:
        timer = Instant(now + rules.policy.resend)
        return replace(state, timer_at=timer), (Send(state.register),)
    return state, ()


def tick_registered(state: Consumer, event: Tick, now: Instant, rules: Rules) -> Result[Consumer]:
    """I7: QUERY is sent until the verdict or the waiting deadline."""
    if now >= state.deadline_at:
        return _revoke(state, now, rules, Reason.WAITED)
    if now >= state.timer_at:
        timer = Instant(now + rules.policy.query)
        return replace(state, timer_at=timer), (Send(Query(state.attempt)),)
    return state, ()


def tick_settling(state: Consumer, event: Tick, now: Instant, rules: Rules) -> Result[Consumer]:
    """Every handle was closed when the verdict left; under a known bound the bytes are over."""
    if now < state.deadline_at:
        return state, ()
    if rules.capabilities.write_bound is None:
        return _quarantine(state, Reason.UNPROVEN)
    status = RELEASED if state.told else FAILED
    state, effects = _end(state, status, MemberOutcome.FAILED, Reason.UNPROVEN)
    return state, (*effects, Send(Received(state.attempt)))


def tick_revoking(state: Consumer, event: Tick, now: Instant, rules: Rules) -> Result[Consumer]:
    """I7: REVOKE is resent; too long without an answer, the link is suspect. R6 counts here too."""
    if rule.fence_passed(now, state.fence, rules.capabilities.write_bound):
        return _end(state, RELEASED, MemberOutcome.FAILED, Reason.LINK_LOST)
    if now >= state.deadline_at:
        return replace(state, deadline_at=FOREVER, timer_at=FOREVER), (SuspectLink(state.attempt),)
    if now >= state.timer_at:
        timer = Instant(now + rules.policy.resend)
        return replace(state, timer_at=timer), (Send(Revoke(state.attempt, state.final)),)
    return state, ()


def tick_quarantined(state: Consumer, event: Tick, now: Instant, rules: Rules) -> Result[Consumer]:
    """R6: free strictly after the fence, under a known bound."""
    if rule.fence_passed(now, state.fence, rules.capabilities.write_bound):
        return _end(state, RELEASED, MemberOutcome.FAILED, Reason.LINK_LOST)
    if now >= state.deadline_at:
        return replace(state, deadline_at=FOREVER), ()
    return state, ()

"""What the producer machine does: one pure function per kind of step, and the pieces they share."""

from __future__ import annotations

from . import rules as rule
from .effects import Counted, Effect, LinkDown, PostWrite, Send, SourceFreed
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
from .ids import FOREVER, AttemptId, Instant, Part
from .messages import (
    Complete,
    Failed,
    Query,
    Reason,
    Received,
    Registered,
    Revoke,
    Revoked,
    Unproven,
    Verdict,
)
from .producer import (
    DONE,
    DRAINING,
    EXPECTED,
    EXPIRED,
    FAILED,
    HOLDING,
    NOTIFYING,
    PREEMPTED,
    PREFILLING,
    QUEUED,
    RETRYING,
    WRITING,
    Prefill,
    Producer,
    Registration,
)
from .table import Result, Rules, replace

# -- pieces of actions


def _find(state: Producer, attempt: AttemptId) -> Verdict | None:
    return next((verdict for verdict in state.ended if verdict.attempt == attempt), None)


def _serves(state: Producer, attempt: AttemptId) -> bool:
    return state.registration is not None and state.registration.register.attempt == attempt


def _free(state: Producer) -> Result[Producer]:
    """Report once that nothing reads the source and nobody can be served from it."""
    if state.freed:
        return state, ()
    return (
        replace(state, freed=True, source=()),
        (SourceFreed(state.transfer, state.consumer_rank),),
    )


_RESTING = {
    Prefill.UNHEARD: FAILED,
    Prefill.QUEUED: QUEUED,
    Prefill.RUNNING: PREFILLING,
    Prefill.PREEMPTED: PREEMPTED,
    Prefill.FINISHED: HOLDING,
    Prefill.ABORTED: FAILED,
}


def _rest(state: Producer) -> Result[Producer]:
    """Nobody is served and nothing is open: the status follows from the prefill alone."""
    state = replace(state, status=_RESTING[state.prefill], timer_at=FOREVER, transfer_until=FOREVER)
    return _free(state) if state.status is FAILED else (state, ())


def _end_attempt(state: Producer, verdict: Verdict, send: bool) -> Result[Producer]:
    """R7: the attempt has ended; remember how, and tell whoever is to be told."""
    ended = tuple(each for each in state.ended if each.attempt != verdict.attempt)
    state = replace(
        state,
        ended=(*ended, verdict),
        registration=None,
        done=(),
        missing=(),
        ordered=0,
        next_part=0,
        failures=0,
        starved=False,
        cause=None,
        answer=False,
    )
    return state, (Send(verdict),) if send else ()


def _drain(
    state: Producer, now: Instant, rules: Rules, cause: Reason | None, answer: bool
) -> Result[Producer]:
    """R8: nothing more is ordered; the verdict waits for the last handle."""
    until = Instant(now + rules.policy.transfer) if state.open else FOREVER
    state = replace(state, status=DRAINING, cause=cause, answer=answer, transfer_until=until)
    return _drained(replace(state, timer_at=_unknown_timer(state)))


def _unknown_timer(state: Producer) -> Instant:
    """When the next unknown part is over: strictly after its bound."""
    at = min((at for _, at in state.unknown), default=FOREVER)
    return at if at == FOREVER else Instant(at + 1)


def _drained(state: Producer) -> Result[Producer]:
    """The verdict, once every handle is closed; UNPROVEN where some never will be."""
    registration = state.registration
    if state.open or registration is None:
        return state, ()
    attempt = registration.register.attempt
    if state.unknown:
        if not state.answer or any(at != FOREVER for _, at in state.unknown):
            return state, ()
        return state, (Send(Unproven(attempt, state.done)),)
    verdict: Verdict = (
        Revoked(attempt, state.done)
        if state.cause is None
        else Failed(attempt, state.done, state.cause)
    )
    state, sent = _end_attempt(state, verdict, state.answer)
    state, rest = _rest(state)
    return state, (*sent, *rest)


def _fail(state: Producer, now: Instant, rules: Rules, reason: Reason) -> Result[Producer]:
    return _drain(state, now, rules, reason, answer=True)


def _order(state: Producer) -> Result[Producer]:
    """Order a WRITE for each range that exists, is wanted, and is not ordered yet (R10)."""
    registration = state.registration
    if registration is None or state.starved:
        return state, ()
    register = registration.register
    ready = min(state.computed, register.end)
    ranges = [each for each in state.missing if each[1] <= ready]
    missing = tuple(each for each in state.missing if each[1] > ready)
    begin = max(state.ordered, register.start)
    if ready > begin:
        ranges.append((begin, ready))
    if not ranges:
        return state, ()
    parts = tuple(
        Part(state.next_part + index, start, end) for index, (start, end) in enumerate(ranges)
    )
    state = replace(
        state,
        open=(*state.open, *parts),
        missing=missing,
        ordered=max(begin, ready),
        next_part=state.next_part + len(parts),
    )
    posts = tuple(
        PostWrite(
            attempt=register.attempt,
            epoch=registration.epoch,
            part=part,
            source=state.source,
            destination=register.blocks,
            destination_start=register.start,
            arrival_token=register.arrival_token,
        )
        for part in parts
    )
    return state, posts


def _advance(state: Producer, now: Instant, rules: Rules) -> Result[Producer]:
    """Serve the registration as far as the prefill is: order, wait, retry or conclude."""
    registration = state.registration
    assert registration is not None, "only a registration is served"
    register = registration.register
    if state.prefill is Prefill.FINISHED and state.computed < register.end:
        return _fail(state, now, rules, Reason.SHORT)
    state, posts = _order(state)
    if state.prefill is not Prefill.FINISHED:
        return replace(state, status=_RESTING[state.prefill]), posts
    until = state.transfer_until
    if until == FOREVER:
        until = Instant(now + rules.policy.transfer)
    state = replace(state, status=WRITING, transfer_until=until)
    if state.open or state.missing or max(state.ordered, register.start) < register.end:
        return state, posts
    state, sent = _end_attempt(state, Complete(register.attempt, state.done), send=True)
    state = replace(state, status=NOTIFYING, timer_at=FOREVER, transfer_until=FOREVER)
    state, freed = _free(state)
    return state, (*posts, *sent, *freed)


def _close(state: Producer, part: int) -> tuple[Producer, Part | None]:
    """Take a part out of `open` or `unknown`; None if it is not there."""
    for each in state.open:
        if each.number == part:
            left = tuple(other for other in state.open if other.number != part)
            return replace(state, open=left), each
    for each, _ in state.unknown:
        if each.number == part:
            kept = tuple(pair for pair in state.unknown if pair[0].number != part)
            return replace(state, unknown=kept), each
    return state, None


# -- the engine


def arrived(state: Producer, event: Arrived, now: Instant, rules: Rules) -> Result[Producer]:
    """The request is here, perhaps once more. A registration for another prompt is refused."""
    state = replace(
        state,
        status=QUEUED,
        prompt_digest=event.prompt_digest,
        prefill=Prefill.QUEUED,
        computed=0,
        freed=False,
        hold_until=FOREVER,
        timer_at=FOREVER,
    )
    registration = state.registration
    if registration is not None and registration.register.prompt_digest != event.prompt_digest:
        return _fail(state, now, rules, Reason.PROMPT)
    return state, ()


def computed(state: Producer, event: Computed, now: Instant, rules: Rules) -> Result[Producer]:
    if state.prefill in (Prefill.FINISHED, Prefill.ABORTED):
        return state, (Counted("computed_after_the_end"),)
    prefill = Prefill.FINISHED if event.final else Prefill.RUNNING
    hold = state.hold_until
    if event.final and hold == FOREVER:
        hold = Instant(now + rules.policy.hold)
    state = replace(
        state, prefill=prefill, computed=event.tokens, source=event.blocks, hold_until=hold
    )
    if state.status is DRAINING:
        return state, ()
    if state.registration is None:
        return _rest(state)
    return _advance(state, now, rules)


def preempted(
    state: Producer, event: PrefillPreempted, now: Instant, rules: Rules
) -> Result[Producer]:
    """The source goes once the WRITEs reading it are closed; what was written stays written."""
    if state.prefill in (Prefill.FINISHED, Prefill.ABORTED):
        return state, (Counted("preempted_after_the_end"),)
    state = replace(state, prefill=Prefill.PREEMPTED, computed=0)
    if state.status is DRAINING:
        return state, ()
    return replace(state, status=PREEMPTED), ()


def resumed(state: Producer, event: PrefillResumed, now: Instant, rules: Rules) -> Result[Producer]:
    if state.prefill is not Prefill.PREEMPTED:
        return state, (Counted("resumed_unpreempted"),)
    state = replace(state, prefill=Prefill.RUNNING)
    if state.status is DRAINING:
        return state, ()
    return replace(state, status=PREFILLING), ()


def aborted(state: Producer, event: PrefillAborted, now: Instant, rules: Rules) -> Result[Producer]:
    state = replace(state, prefill=Prefill.ABORTED)
    if state.status is DRAINING:
        return state, ()
    if state.registration is None:
        return _rest(state)
    return _fail(state, now, rules, event.reason)


# -- the consumer


def register(
    state: Producer, event: RegistrationReceived, now: Instant, rules: Rules
) -> Result[Producer]:
    """R7 first: an attempt that has ended is answered, never served. Then one consumer at a time."""
    register = event.register
    attempt = register.attempt
    verdict = _find(state, attempt)
    if verdict is not None:
        return state, (Send(verdict),)
    if _serves(state, attempt):
        return state, (Send(Registered(attempt)),)
    if state.registration is not None:
        return state, (Counted("registration_must_wait"),)
    if state.prefill is not Prefill.UNHEARD and register.prompt_digest != state.prompt_digest:
        return _end_attempt(state, Failed(attempt, (), Reason.PROMPT), send=True)
    state = replace(state, registration=Registration(register, event.epoch, event.consumer))
    answer = (Send(Registered(attempt)),)
    if state.prefill is Prefill.UNHEARD:
        within = min(rules.policy.expected, register.deadline)
        state = replace(state, status=EXPECTED, timer_at=Instant(now + within))
        return state, answer
    state, effects = _advance(state, now, rules)
    return state, (*answer, *effects)


def register_late(
    state: Producer, event: RegistrationReceived, now: Instant, rules: Rules
) -> Result[Producer]:
    """R7: what is over is answered; a new attempt finds nothing left to serve it from."""
    if state.prefill is Prefill.UNHEARD and state.registration is None:
        return register(state, event, now, rules)
    attempt = event.register.attempt
    verdict = _find(state, attempt)
    if verdict is not None:
        return state, (Send(verdict),)
    reason = {EXPIRED: Reason.EXPIRED, FAILED: Reason.ABORTED}.get(state.status, Reason.GONE)
    return _end_attempt(state, Failed(attempt, (), reason), send=True)


def query(state: Producer, event: Query, now: Instant, rules: Rules) -> Result[Producer]:
    """R7: unknown attempts are tombstoned too, so that a late REGISTER of them is not served."""
    if _serves(state, event.attempt):
        return state, _unfinished(state, event.attempt)
    verdict = _find(state, event.attempt)
    if verdict is not None:
        return state, (Send(verdict),)
    return _remember(state, Failed(event.attempt, (), Reason.UNKNOWN))


def _unfinished(state: Producer, attempt: AttemptId) -> tuple[Effect, ...]:
    """The answer about an attempt that has no verdict: held, or known to be unprovable."""
    stuck = state.status is DRAINING and (
        state.transfer_until == FOREVER if state.open else bool(state.unknown)
    )
    if stuck and all(at == FOREVER for _, at in state.unknown):
        return (Send(Unproven(attempt, state.done)),)
    return (Send(Registered(attempt)),)


def revoke(state: Producer, event: Revoke, now: Instant, rules: Rules) -> Result[Producer]:
    """Answered in every status: at once if nothing is open, else after draining (R8).

    While it drains, REGISTERED says that P is alive and still has it, so that a long WRITE does not
    cost the link.
    """
    if not _serves(state, event.attempt):
        verdict = _find(state, event.attempt)
        if verdict is not None:
            return state, (Send(verdict),)
        return _remember(state, Revoked(event.attempt, ()))
    if state.status is DRAINING:
        return replace(state, answer=True), _unfinished(state, event.attempt)
    return _drain(state, now, rules, None, answer=True)


def _remember(state: Producer, verdict: Verdict) -> Result[Producer]:
    """R7: a verdict on an attempt that is not the one being served."""
    return replace(state, ended=(*state.ended, verdict)), (Send(verdict),)


def received(state: Producer, event: Received, now: Instant, rules: Rules) -> Result[Producer]:
    """R7: the consumer will not name the attempt again, and links are ordered."""
    ended = tuple(each for each in state.ended if each.attempt != event.attempt)
    status = DONE if state.status is NOTIFYING and len(ended) < len(state.ended) else state.status
    return replace(state, ended=ended, status=status), ()


# -- the link


def link_down(state: Producer, event: LinkDown, now: Instant, rules: Rules) -> Result[Producer]:
    """R11: nothing more for registrations made over it; what is remembered survives."""
    if state.registration is None or state.registration.epoch != event.epoch:
        return state, ()
    if state.status is DRAINING:
        return replace(state, answer=False), ()
    return _drain(state, now, rules, Reason.LINK_LOST, answer=False)


def permitted(state: Producer, event: Permitted, now: Instant, rules: Rules) -> Result[Producer]:
    registration = state.registration
    if not state.starved or registration is None or registration.epoch != event.epoch:
        return state, ()
    return _go_on(replace(state, starved=False), now, rules)


# -- the transport


def done(state: Producer, event: WriteDone, now: Instant, rules: Rules) -> Result[Producer]:
    state, part = _close(state, event.part)
    if part is None or not _serves(state, event.attempt):
        return state, (Counted("stale_completion"),)
    state = replace(state, done=(*state.done, part))
    if state.status is DRAINING:
        return _drained(state)
    return _go_on(state, now, rules)


def _go_on(state: Producer, now: Instant, rules: Rules) -> Result[Producer]:
    """Serve on, unless a retry still waits for its backoff or for other handles to close."""
    if state.status is RETRYING and (state.open or state.timer_at != FOREVER):
        return state, ()
    return _advance(state, now, rules)


def write_failed(
    state: Producer, event: WriteFailed, now: Instant, rules: Rules
) -> Result[Producer]:
    """R10: the tokens are ordered again under a new part number, a few times."""
    state, part = _close(state, event.part)
    if part is None or not _serves(state, event.attempt):
        return state, (Counted("stale_completion"),)
    if state.status is DRAINING:
        return _drained(state)
    state = replace(
        state, failures=state.failures + 1, missing=(*state.missing, (part.start, part.end))
    )
    if state.failures > rules.policy.write_retries:
        return _fail(state, now, rules, Reason.WRITE)
    if state.status is RETRYING:
        return _go_on(state, now, rules)
    if state.status is not WRITING:
        return state, ()
    return replace(state, status=RETRYING, timer_at=Instant(now + rules.policy.write_backoff)), ()


def write_refused(
    state: Producer, event: WriteRefused, now: Instant, rules: Rules
) -> Result[Producer]:
    """R3, R5: no permit at the moment; its tokens wait for the next one."""
    state, part = _close(state, event.part)
    if part is None or not _serves(state, event.attempt):
        return state, (Counted("stale_completion"),)
    if state.status is DRAINING:
        return _drained(state)
    state = replace(state, starved=True, missing=(*state.missing, (part.start, part.end)))
    return _go_on(state, now, rules)


def write_unknown(
    state: Producer, event: WriteUnknown, now: Instant, rules: Rules
) -> Result[Producer]:
    """R14: it stays open until the bound, or for ever; the attempt fails either way."""
    state, part = _close(state, event.part)
    if part is None or not _serves(state, event.attempt):
        return state, (Counted("stale_completion"),)
    at = rule.unknown_closes_at(now, rules.capabilities.write_bound)
    state = replace(state, unknown=(*state.unknown, (part, at)))
    if state.status is DRAINING:
        return _drained(replace(state, timer_at=_unknown_timer(state)))
    return _fail(state, now, rules, Reason.WRITE)


def proof(
    state: Producer, event: WriterGone | Proven, now: Instant, rules: Rules
) -> Result[Producer]:
    """Whoever reads or could be written is gone, or the operator says so: unknown parts are over."""
    registration = state.registration
    if not state.unknown or registration is None:
        return state, ()
    if isinstance(event, WriterGone) and event.worker != registration.consumer:
        return state, ()
    return _drained(replace(state, unknown=()))


# -- time


def tick_expected(state: Producer, event: Tick, now: Instant, rules: Rules) -> Result[Producer]:
    if now < state.timer_at:
        return state, ()
    return _fail(state, now, rules, Reason.NEVER_ARRIVED)


def tick_holding(state: Producer, event: Tick, now: Instant, rules: Rules) -> Result[Producer]:
    if now < state.hold_until:
        return state, ()
    return _free(replace(state, status=EXPIRED))


def tick_writing(state: Producer, event: Tick, now: Instant, rules: Rules) -> Result[Producer]:
    """I7: the transfer clock; it starts when prefill is over and the WRITEs alone are waited for."""
    if now >= state.transfer_until:
        return _fail(state, now, rules, Reason.STALLED)
    if state.status is RETRYING and now >= state.timer_at:
        return _go_on(replace(state, timer_at=FOREVER), now, rules)
    return state, ()


def tick_draining(state: Producer, event: Tick, now: Instant, rules: Rules) -> Result[Producer]:
    """An unknown handle closes strictly after its bound; one that will not close is unproven.

    The source stays pinned for as long as a handle may read it, whatever else has expired.
    """
    registration = state.registration
    assert registration is not None, "only an attempt drains"
    if now >= state.transfer_until:
        state = replace(state, transfer_until=FOREVER)
        sent = (Send(Unproven(registration.register.attempt, state.done)),) if state.answer else ()
        return state, sent
    left = tuple(pair for pair in state.unknown if now <= pair[1])
    if left == state.unknown:
        return state, ()
    state = replace(state, unknown=left)
    return _drained(replace(state, timer_at=_unknown_timer(state)))

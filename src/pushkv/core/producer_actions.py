"""What the producer machine does: one pure function per kind of step."""

from __future__ import annotations

from . import rules as rule
from .effects import Counted, Effect, LinkDown, Send
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
from .ids import FOREVER, AttemptId, Instant
from .messages import (
    Complete,
    Failed,
    Progress,
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
    NOTIFYING,
    PREEMPTED,
    PREFILLING,
    QUEUED,
    RETRYING,
    WRITING,
    Doubt,
    Prefill,
    Producer,
    Registration,
    replace,
)
from .producer_pieces import (
    advance,
    close,
    drain,
    drained,
    end_attempt,
    fail,
    free,
    rest,
    serves,
    unknown_timer,
    verdict_of,
)
from .table import Result, Rules

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
        return fail(state, now, rules, Reason.PROMPT)
    return state, ()


def computed(state: Producer, event: Computed, now: Instant, rules: Rules) -> Result[Producer]:
    """More KV exists: order what is registered of it; the hold time starts when prefill is over."""
    state = _computed(state, event, now, rules)
    if state.registration is None:
        return rest(state)
    return advance(state, now, rules)


def computed_draining(
    state: Producer, event: Computed, now: Instant, rules: Rules
) -> Result[Producer]:
    """Nothing is ordered; whoever registers next is served from it."""
    if state.prefill in (Prefill.FINISHED, Prefill.ABORTED):
        return state, (Counted("computed_after_the_end"),)
    return _computed(state, event, now, rules), ()


def _computed(state: Producer, event: Computed, now: Instant, rules: Rules) -> Producer:
    prefill = Prefill.FINISHED if event.final else Prefill.RUNNING
    hold = state.hold_until
    if event.final and hold == FOREVER:
        hold = Instant(now + rules.policy.hold)
    return replace(
        state, prefill=prefill, computed=event.tokens, source=event.blocks, hold_until=hold
    )


def preempted(
    state: Producer, event: PrefillPreempted, now: Instant, rules: Rules
) -> Result[Producer]:
    """The source goes once the WRITEs reading it are closed; what was written stays written."""
    return replace(state, status=PREEMPTED, prefill=Prefill.PREEMPTED, computed=0), ()


def preempted_draining(
    state: Producer, event: PrefillPreempted, now: Instant, rules: Rules
) -> Result[Producer]:
    """The status follows when it has drained."""
    if state.prefill in (Prefill.FINISHED, Prefill.ABORTED):
        return state, (Counted("preempted_after_the_end"),)
    return replace(state, prefill=Prefill.PREEMPTED, computed=0), ()


def resumed(state: Producer, event: PrefillResumed, now: Instant, rules: Rules) -> Result[Producer]:
    """Prefill begins again; tokens written for this attempt stay written."""
    return replace(state, status=PREFILLING, prefill=Prefill.RUNNING), ()


def resumed_draining(
    state: Producer, event: PrefillResumed, now: Instant, rules: Rules
) -> Result[Producer]:
    """The status follows when it has drained."""
    if state.prefill is not Prefill.PREEMPTED:
        return state, (Counted("resumed_unpreempted"),)
    return replace(state, prefill=Prefill.RUNNING), ()


def aborted(state: Producer, event: PrefillAborted, now: Instant, rules: Rules) -> Result[Producer]:
    """R8: the consumer is told once nothing is open any more."""
    state = replace(state, prefill=Prefill.ABORTED)
    if state.registration is None:
        return rest(state)
    return fail(state, now, rules, event.reason)


def aborted_draining(
    state: Producer, event: PrefillAborted, now: Instant, rules: Rules
) -> Result[Producer]:
    """It ends when it has drained."""
    return replace(state, prefill=Prefill.ABORTED), ()


# -- the consumer


def register(
    state: Producer, event: RegistrationReceived, now: Instant, rules: Rules
) -> Result[Producer]:
    """R7: an attempt that has ended is answered, never served. One consumer at a time."""
    register = event.register
    attempt = register.attempt
    verdict = verdict_of(state, attempt)
    if verdict is not None:
        return state, (Send(verdict),)
    if serves(state, attempt):
        return state, (Send(Registered(attempt)),)
    if state.registration is not None:
        return state, (Counted("registration_must_wait"),)
    if state.prefill is not Prefill.UNHEARD and register.prompt_digest != state.prompt_digest:
        return end_attempt(state, Failed(attempt, (), Reason.PROMPT), send=True)
    state = replace(state, registration=Registration(register, event.epoch, event.consumer))
    answer = (Send(Registered(attempt)),)
    if state.prefill is Prefill.UNHEARD:
        within = min(rules.policy.expected, register.deadline)
        state = replace(state, status=EXPECTED, timer_at=Instant(now + within))
        return state, answer
    state, effects = advance(state, now, rules)
    return state, (*answer, *effects)


def register_late(
    state: Producer, event: RegistrationReceived, now: Instant, rules: Rules
) -> Result[Producer]:
    """R7: what is over is answered; a new attempt finds nothing left to serve it from."""
    if state.prefill is Prefill.UNHEARD and state.registration is None:
        return register(state, event, now, rules)
    attempt = event.register.attempt
    verdict = verdict_of(state, attempt)
    if verdict is not None:
        return state, (Send(verdict),)
    reason = {EXPIRED: Reason.EXPIRED, FAILED: Reason.ABORTED}.get(state.status, Reason.GONE)
    return end_attempt(state, Failed(attempt, (), reason), send=True)


def query(state: Producer, event: Query, now: Instant, rules: Rules) -> Result[Producer]:
    """R7: unknown attempts are tombstoned too, so that a late REGISTER of them is not served."""
    if serves(state, event.attempt):
        return state, _unfinished(state, event.attempt)
    verdict = verdict_of(state, event.attempt)
    if verdict is not None:
        return state, (Send(verdict),)
    return _remember(state, Failed(event.attempt, (), Reason.UNKNOWN))


def _unfinished(state: Producer, attempt: AttemptId) -> tuple[Effect, ...]:
    """The answer about an attempt that has no verdict: held, or known to be unprovable."""
    stuck = state.status is DRAINING and (
        state.transfer_until == FOREVER if state.open else bool(state.unknown)
    )
    if stuck and all(doubt.over_at == FOREVER for doubt in state.unknown):
        return (Send(Unproven(attempt, state.done)),)
    return (Send(Registered(attempt)),)


def revoke(state: Producer, event: Revoke, now: Instant, rules: Rules) -> Result[Producer]:
    """Answered in every status: at once if nothing is open, else after draining (R8).

    While it drains, REGISTERED says that P is alive and still has it, so that a long WRITE does not
    cost the link.
    """
    if event.final:
        state = _given_up(state, event, now, rules)
    if not serves(state, event.attempt):
        verdict = verdict_of(state, event.attempt)
        if verdict is not None:
            return state, (Send(verdict),)
        return _remember(state, Revoked(event.attempt, ()))
    if state.status is DRAINING:
        return replace(state, answer=True), _unfinished(state, event.attempt)
    state, effects = drain(state, now, rules, None, answer=True)
    if not any(isinstance(each, Send) for each in effects):
        effects = (*effects, *_unfinished(state, event.attempt))
    return state, effects


def _given_up(state: Producer, event: Revoke, now: Instant, rules: Rules) -> Producer:
    """I7: who is served next, if anybody, is another consumer, and comes soon."""
    if state.freed or (state.registration is not None and not serves(state, event.attempt)):
        return state
    until = Instant(now + rules.policy.hold_cancelled)
    return replace(state, hold_until=min(state.hold_until, until))


def _remember(state: Producer, verdict: Verdict) -> Result[Producer]:
    """R7: a verdict on an attempt that is not the one being served."""
    return replace(state, ended=(*state.ended, verdict)), (Send(verdict),)


def received(state: Producer, event: Received, now: Instant, rules: Rules) -> Result[Producer]:
    """R7: the consumer will not name the attempt again, and links are ordered."""
    ended = tuple(each for each in state.ended if each.attempt != event.attempt)
    told = not any(isinstance(verdict, Complete) for verdict in ended)
    status = DONE if state.status is NOTIFYING and told else state.status
    return replace(state, ended=ended, status=status), ()


# -- the link


def link_down(state: Producer, event: LinkDown, now: Instant, rules: Rules) -> Result[Producer]:
    """R11: nothing more for registrations made over it; what is remembered survives."""
    if state.registration is None or state.registration.epoch != event.epoch:
        return state, ()
    return drain(state, now, rules, Reason.LINK_LOST, answer=False)


def link_down_draining(
    state: Producer, event: LinkDown, now: Instant, rules: Rules
) -> Result[Producer]:
    """Nobody hears the verdict; whoever has not given up asks for it over the next link."""
    return replace(state, answer=False), ()


def permitted(state: Producer, event: Permitted, now: Instant, rules: Rules) -> Result[Producer]:
    """R3: the WRITEs that were refused may be ordered again, over this link alone (R11)."""
    registration = state.registration
    if registration is None or registration.epoch != event.epoch:
        return state, ()
    state = replace(state, ordered_unpermitted=state.next_part)
    if not state.starved:
        return state, ()
    return _go_on(replace(state, starved=False), now, rules)


# -- the transport


def done(state: Producer, event: WriteDone, now: Instant, rules: Rules) -> Result[Producer]:
    """R10: a part in place counts for this attempt only.

    While prefill runs the consumer hears of each: that renews its waiting, and it need not ask.
    """
    state, part = close(state, event)
    if part is None:
        return state, (Counted("stale_completion"),)
    state = replace(state, done=(*state.done, part))
    if state.status is DRAINING:
        return drained(state)
    state, effects = _go_on(state, now, rules)
    if state.status not in (PREFILLING, PREEMPTED):
        return state, effects
    written = sum(each.end - each.start for each in state.done)
    return state, (*effects, Send(Progress(event.attempt, written)))


def _go_on(state: Producer, now: Instant, rules: Rules) -> Result[Producer]:
    """Serve on, unless a retry still waits for its backoff or for other handles to close."""
    if state.status is RETRYING and (state.open or state.timer_at != FOREVER):
        return state, ()
    return advance(state, now, rules)


def write_failed(
    state: Producer, event: WriteFailed, now: Instant, rules: Rules
) -> Result[Producer]:
    """R10: the tokens are ordered again under a new part number, a few times."""
    state, part = close(state, event)
    if part is None:
        return state, (Counted("stale_completion"),)
    if state.status is DRAINING:
        return drained(state)
    state = replace(
        state, failures=state.failures + 1, missing=(*state.missing, (part.start, part.end))
    )
    if state.failures > rules.policy.write_retries:
        return fail(state, now, rules, Reason.WRITE)
    if state.status is RETRYING:
        return _go_on(state, now, rules)
    if state.status is not WRITING:
        return state, ()
    return replace(state, status=RETRYING, timer_at=Instant(now + rules.policy.write_backoff)), ()


def write_refused(
    state: Producer, event: WriteRefused, now: Instant, rules: Rules
) -> Result[Producer]:
    """R3, R5: no permit at the moment; its tokens wait for the next one.

    Unless that came while the refusal was on its way: then they are ordered at once, and once only.
    """
    state, part = close(state, event)
    if part is None:
        return state, (Counted("stale_completion"),)
    if state.status is DRAINING:
        return drained(state)
    starved = state.starved or part.number >= state.ordered_unpermitted
    state = replace(state, starved=starved, missing=(*state.missing, (part.start, part.end)))
    return _go_on(state, now, rules)


def write_unknown(
    state: Producer, event: WriteUnknown, now: Instant, rules: Rules
) -> Result[Producer]:
    """R14: the attempt fails; it is proven over after the bound, and where there is none, never."""
    state, part = close(state, event)
    if part is None:
        return state, (Counted("stale_completion"),)
    at = rule.unknown_closes_at(now, rules.capabilities.write_bound)
    state = replace(state, unknown=(*state.unknown, Doubt(part, at, event.source_idle)))
    if state.status is DRAINING:
        return drained(replace(state, timer_at=unknown_timer(state)))
    return fail(state, now, rules, Reason.WRITE)


def proof(
    state: Producer, event: WriterGone | Proven, now: Instant, rules: Rules
) -> Result[Producer]:
    """Whoever could be written is gone, or the operator says so: unknown parts are over."""
    registration = state.registration
    assert registration is not None, "only an attempt drains"
    if isinstance(event, WriterGone) and event.worker != registration.consumer:
        return state, ()
    return drained(replace(state, unknown=()))


# -- time


def tick_expected(state: Producer, event: Tick, now: Instant, rules: Rules) -> Result[Producer]:
    """I7: the request did not come in time."""
    if now < state.timer_at:
        return state, ()
    return fail(state, now, rules, Reason.NEVER_ARRIVED)


def tick_holding(state: Producer, event: Tick, now: Instant, rules: Rules) -> Result[Producer]:
    """I7: nobody registered in time."""
    if now < state.hold_until:
        return state, ()
    return free(replace(state, status=EXPIRED))


def tick_writing(state: Producer, event: Tick, now: Instant, rules: Rules) -> Result[Producer]:
    """I7: the transfer clock; it starts when only WRITEs are waited for any more."""
    if now >= state.transfer_until:
        return fail(state, now, rules, Reason.STALLED)
    if state.status is RETRYING and now >= state.timer_at:
        return _go_on(replace(state, timer_at=FOREVER), now, rules)
    return state, ()


def tick_draining(state: Producer, event: Tick, now: Instant, rules: Rules) -> Result[Producer]:
    """An unknown handle closes strictly after its bound; one that will not close is unproven.

    The source stays pinned for as long as a handle may read it, whatever else has expired.
    """
    registration = state.registration
    assert registration is not None, "only an attempt drains"
    effects: tuple[Effect, ...] = ()
    left = tuple(doubt for doubt in state.unknown if now <= doubt.over_at)
    if left != state.unknown:
        state = replace(state, unknown=left)
        state, effects = drained(replace(state, timer_at=unknown_timer(state)))
    if state.status is not DRAINING or now < state.transfer_until:
        return state, effects
    state = replace(state, transfer_until=FOREVER)
    if state.answer:
        effects = (*effects, Send(Unproven(registration.register.attempt, state.done)))
    return state, effects

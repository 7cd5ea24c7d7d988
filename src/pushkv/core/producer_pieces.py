"""What the producer's actions share: ordering, draining, ending an attempt."""

from __future__ import annotations

from collections.abc import Iterator

from .effects import PostWrite, Send, SourceFreed, WithdrawWrites
from .events import WriteDone, WriteFailed, WriteRefused, WriteUnknown
from .ids import FOREVER, AttemptId, Instant, Part
from .messages import (
    Complete,
    Failed,
    Reason,
    Revoked,
    Unproven,
    Verdict,
)
from .producer import (
    DRAINING,
    FAILED,
    HOLDING,
    NOTIFYING,
    PREEMPTED,
    PREFILLING,
    QUEUED,
    WRITING,
    Prefill,
    Producer,
    replace,
)
from .table import Result, Rules


def verdict_of(state: Producer, attempt: AttemptId) -> Verdict | None:
    """R7: how the attempt ended; None where it has not, or is not known."""
    return next((verdict for verdict in state.ended if verdict.attempt == attempt), None)


def serves(state: Producer, attempt: AttemptId) -> bool:
    """Whether this attempt, and no other, is being served or drained."""
    return state.registration is not None and state.registration.register.attempt == attempt


def free(state: Producer) -> Result[Producer]:
    """Report once that nothing reads the source and nobody can be served from it."""
    if state.freed:
        return state, ()
    return (
        replace(state, freed=True, source=()),
        (SourceFreed(state.transfer, state.consumer_rank),),
    )


RESTING = {
    Prefill.UNHEARD: FAILED,
    Prefill.QUEUED: QUEUED,
    Prefill.RUNNING: PREFILLING,
    Prefill.PREEMPTED: PREEMPTED,
    Prefill.FINISHED: HOLDING,
    Prefill.ABORTED: FAILED,
}


def rest(state: Producer) -> Result[Producer]:
    """Nobody is served and nothing is open: the status follows from the prefill alone."""
    state = replace(state, status=RESTING[state.prefill], timer_at=FOREVER, transfer_until=FOREVER)
    return free(state) if state.status is FAILED else (state, ())


def end_attempt(state: Producer, verdict: Verdict, send: bool) -> Result[Producer]:
    """R7: the attempt has ended; remember how, and tell whoever is to be told."""
    ended = tuple(each for each in state.ended if each.attempt != verdict.attempt)
    state = replace(
        state,
        ended=(*ended, verdict),
        registration=None,
        unknown=(),
        done=(),
        missing=(),
        ordered=0,
        next_part=0,
        failures=0,
        ordered_unpermitted=0,
        starved=False,
        cause=None,
        answer=False,
    )
    return state, (Send(verdict),) if send else ()


def drain(
    state: Producer, now: Instant, rules: Rules, cause: Reason | None, answer: bool
) -> Result[Producer]:
    """R8: nothing more is ordered or posted; the verdict waits for the last handle."""
    registration = state.registration
    assert registration is not None, "only an attempt drains"
    until = Instant(now + rules.policy.transfer) if state.open else FOREVER
    state = replace(state, status=DRAINING, cause=cause, answer=answer, transfer_until=until)
    withdrawn = (WithdrawWrites(registration.register.attempt),) if state.open else ()
    state, effects = drained(replace(state, timer_at=unknown_timer(state)))
    return state, (*withdrawn, *effects)


def unknown_timer(state: Producer) -> Instant:
    """When the next unknown part is over: strictly after its bound."""
    at = min((doubt.over_at for doubt in state.unknown), default=FOREVER)
    return at if at == FOREVER else Instant(at + 1)


def drained(state: Producer) -> Result[Producer]:
    """The verdict, once every handle is closed; UNPROVEN where some never will be.

    An unproven attempt is over like any other once nothing reads its source: what may still land is
    the consumer's to wait for.
    """
    registration = state.registration
    if state.open or registration is None:
        return state, ()
    attempt = registration.register.attempt
    verdict: Verdict
    if any(doubt.over_at != FOREVER for doubt in state.unknown):
        return state, ()
    if state.unknown:
        verdict = Unproven(attempt, state.done)
        if not all(doubt.source_idle for doubt in state.unknown):
            return state, (Send(verdict),) if state.answer else ()
    elif state.cause is None:
        verdict = Revoked(attempt, state.done)
    else:
        verdict = Failed(attempt, state.done, state.cause)
    state, sent = end_attempt(state, verdict, state.answer)
    state, freed = rest(state)
    return state, (*sent, *freed)


def fail(state: Producer, now: Instant, rules: Rules, reason: Reason) -> Result[Producer]:
    """Give the attempt up; its consumer is told once nothing is open (R8)."""
    return drain(state, now, rules, reason, answer=True)


CUTS_MOST = 1_024
"""Into so many parts an attempt is cut at most: a verdict names them all."""


def cut(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """Tokens [start, end), cut at the multiples of `step`."""
    while start < end:
        until = min(end, start - start % step + step)
        yield start, until
        start = until


def order(state: Producer, rules: Rules) -> Result[Producer]:
    """Order a WRITE for each range that exists, is wanted, and is not ordered yet (R10).

    A long range becomes several parts, so that others need not wait for all of it.
    """
    registration = state.registration
    if registration is None or state.starved:
        return state, ()
    register = registration.register
    ready = min(state.computed, register.end)
    ranges = [each for each in state.missing if each[1] <= ready]
    missing = tuple(each for each in state.missing if each[1] > ready)
    begin = max(state.ordered, register.start)
    step = rules.policy.part_tokens
    step *= max(1, -(-register.end // (step * CUTS_MOST)))
    ranges += cut(begin, ready, step)
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
            source_end=state.computed,
            destination=register.blocks,
            destination_start=register.start,
            arrival_token=register.arrival_token,
        )
        for part in parts
    )
    return state, posts


def advance(state: Producer, now: Instant, rules: Rules) -> Result[Producer]:
    """Serve the registration as far as the prefill is: order, wait, retry or conclude."""
    registration = state.registration
    assert registration is not None, "only a registration is served"
    register = registration.register
    if state.prefill is Prefill.FINISHED and state.computed < register.end:
        return fail(state, now, rules, Reason.SHORT)
    state, posts = order(state, rules)
    if state.prefill is not Prefill.FINISHED:
        return replace(state, status=RESTING[state.prefill]), posts
    until = state.transfer_until
    if until == FOREVER:
        until = Instant(now + rules.policy.transfer)
    state = replace(state, status=WRITING, transfer_until=until)
    if state.open or state.missing or max(state.ordered, register.start) < register.end:
        return state, posts
    state, sent = end_attempt(state, Complete(register.attempt, state.done), send=True)
    state = replace(state, status=NOTIFYING, timer_at=FOREVER, transfer_until=FOREVER)
    state, freed = free(state)
    return state, (*posts, *sent, *freed)


def close(
    state: Producer, event: WriteDone | WriteFailed | WriteRefused | WriteUnknown
) -> tuple[Producer, Part | None]:
    """Take a part of the attempt being served out of `open` or `unknown`; None if it is not there.

    R9: numbers begin again with every attempt, so a part is only found under its attempt's name.
    """
    part = event.part
    if not serves(state, event.attempt):
        return state, None
    for each in state.open:
        if each.number == part:
            left = tuple(other for other in state.open if other.number != part)
            return replace(state, open=left), each
    for doubt in state.unknown:
        if doubt.part.number == part:
            kept = tuple(other for other in state.unknown if other is not doubt)
            return replace(state, unknown=kept), doubt.part
    return state, None

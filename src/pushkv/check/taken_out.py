"""The rules of the protocol, each taken out: a function replaced, or rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve

from pushkv.core import (
    consumer_actions,
    producer_actions,
    producer_pieces,
    request,
    rules,
)
from pushkv.core.capabilities import Capabilities
from pushkv.core.consumer import QUARANTINED, RELEASED, REVOKING, SETTLING, WAITING, Consumer
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.copies import replace
from pushkv.core.effects import (
    BlocksReleased,
    LinkDown,
    LinkUp,
    MemberOutcome,
    MemberTold,
    PermitGranted,
)
from pushkv.core.events import (
    Permitted,
    Tick,
    Withdrawn,
    WriteFailed,
    WriteUnknown,
)
from pushkv.core.ids import Duration, Instant, Worker
from pushkv.core.link import LINK, Link, LinkStatus
from pushkv.core.messages import AttemptMessage, Grant, Reason
from pushkv.core.producer import DRAINING, LIVE, Producer
from pushkv.core.producer_table import PRODUCER, SERVING
from pushkv.core.receiving import Receiving
from pushkv.core.request import Request
from pushkv.core.table import Result, Rules

from .patch import Apply, Patch, named_in, swap

__all__ = ["TAKEN_OUT", "free_now"]

TAKEN_OUT: dict[str, Apply] = {}
"""The rules, by what it is like without them."""

taken_out: Callable[[Apply], Apply] = named_in(TAKEN_OUT)


def free_now(state: Consumer, event: object, now: Instant, rules: Rules) -> Result[Consumer]:
    """An action that gives the blocks back at once, whatever is under way."""
    return consumer_actions._end(state, RELEASED, MemberOutcome.FAILED, Reason.CANCELLED)


@taken_out
def cancel_frees(patch: Patch) -> None:
    """R1."""
    swap(patch, CONSUMER, WAITING, Withdrawn, free_now)


@taken_out
def link_end_frees(patch: Patch) -> None:
    """R2."""
    swap(patch, CONSUMER, (*WAITING, SETTLING, REVOKING), LinkDown, free_now)


@taken_out
def no_permit(patch: Patch) -> None:
    """R3."""
    patch.set(rules, "may_post", lambda now, until, bound: True)


@taken_out
def permit_without_drift(patch: Patch) -> None:
    """R4."""
    patch.set(rules, "permit_end", lambda stamp, lease, drift: Instant(stamp + lease))


@taken_out
def permit_from_the_grant(patch: Patch) -> None:
    """R4."""
    echo = LINK.rows[LinkStatus.UP, Grant].action
    assert echo is not None

    def granted(state: Link, event: Grant, now: Instant, rules_: Rules) -> Result[Link]:
        state, effects = echo(state, event, now, rules_)
        until = rules.permit_end(now, event.lease, rules_.policy.drift_ppm)
        return state, tuple(
            evolve(effect, until=until) if isinstance(effect, PermitGranted) else effect
            for effect in effects
        )

    swap(patch, LINK, [LinkStatus.UP], Grant, granted)


@taken_out
def write_bound_not_counted(patch: Patch) -> None:
    """R5."""
    patch.set(rules, "may_post", lambda now, until, bound: now <= until)


@taken_out
def fence_at_the_last_grant(patch: Patch) -> None:
    """R6."""
    patch.set(rules, "fence", lambda last_grant, lease: last_grant)


@taken_out
def grant_on_an_ended_link(patch: Patch) -> None:
    """R6: whoever suspects its link goes on granting over it, as long as the socket lives."""
    up = LINK.rows[LinkStatus.UP, Tick].action
    assert up is not None

    def tick(state: Link, event: Tick, now: Instant, rules_: Rules) -> Result[Link]:
        after, effects = up(state, event, now, rules_)
        if after.status is LinkStatus.SUSPECT and after.grants:
            return replace(after, status=LinkStatus.UP, silent_at=Instant(now * 2)), effects[:1]
        return after, effects

    swap(patch, LINK, [LinkStatus.UP], Tick, tick)


@taken_out
def nothing_remembered(patch: Patch) -> None:
    """R7."""
    patch.set(producer_actions, "verdict_of", lambda state, attempt: None)


@taken_out
def verdict_before_the_handles_close(patch: Patch) -> None:
    """R8."""
    wait = producer_pieces.drained

    def drained(state: Producer) -> Result[Producer]:
        return wait(replace(state, open=(), unknown=()))

    patch.set(producer_pieces, "drained", drained)
    patch.set(producer_actions, "drained", drained)


@taken_out
def any_attempt_will_do(patch: Patch) -> None:
    """R9."""
    routed = Receiving.message

    def message(self: Receiving, peer: Worker, message: AttemptMessage, now: Instant) -> list[Any]:
        live = [name for name in self.consumers.states if name.transfer == message.attempt.transfer]
        newest = max(live, key=lambda name: name.attempt, default=message.attempt)
        return routed(self, peer, evolve(message, attempt=newest), now)

    patch.set(Receiving, "message", message)


@taken_out
def coverage_unchecked(patch: Patch) -> None:
    """R10."""
    patch.set(rules, "covers", lambda parts, start, end: True)


@taken_out
def done_is_taken_for_visible(patch: Patch) -> None:
    """R10."""
    patch.set(rules, "proven", lambda parts, arrived, capabilities: True)


@taken_out
def new_permit_covers_old_registrations(patch: Patch) -> None:
    """R11."""

    def permitted(
        state: Producer, event: Permitted, now: Instant, rules_: Rules
    ) -> Result[Producer]:
        if state.registration is not None:
            state = replace(state, registration=evolve(state.registration, epoch=event.epoch))
        return producer_actions.permitted(state, event, now, rules_)

    swap(patch, PRODUCER, LIVE, LinkDown, None)
    swap(patch, PRODUCER, LIVE, Permitted, permitted)


@taken_out
def first_rank_frees(patch: Patch) -> None:
    """R12."""
    settle = request._settle

    def eager(state: Request) -> Result[Request]:
        if state.freed and not state.released:
            state, effects = settle(replace(state, released=True))
            return state, (BlocksReleased(state.transfer, state.attempt), *effects)
        return settle(state)

    patch.set(request, "_settle", eager)


@taken_out
def first_rank_delivers(patch: Patch) -> None:
    """R12."""
    told = request._told

    def eager(state: Request, event: Any, now: Instant, rules_: Rules) -> Result[Request]:
        member = request._member(event)
        return told(replace(state, members=(member,)), event, now, rules_)

    swap(patch, request.REQUEST, [request.RECEIVING], MemberTold, eager)


@taken_out
def no_restart_grace(patch: Patch) -> None:
    """R13."""

    def none(lease: Duration, capabilities: Capabilities) -> Duration:
        return Duration(0)

    patch.set(rules, "restart_grace", none)


@taken_out
def a_new_incarnation_proves_death(patch: Patch) -> None:
    """R14."""
    back = CONSUMER.rows[QUARANTINED, LinkUp].action
    assert back is not None

    def link_back(state: Consumer, event: LinkUp, now: Instant, rules_: Rules) -> Result[Consumer]:
        if event.peer != state.producer:
            return free_now(state, event, now, rules_)
        result: Result[Consumer] = back(state, event, now, rules_)
        return result

    swap(patch, CONSUMER, [QUARANTINED], LinkUp, link_back)


@taken_out
def an_unknown_write_is_over(patch: Patch) -> None:
    """R14."""
    patch.set(rules, "unknown_closes_at", lambda now, bound: now)
    swap(patch, PRODUCER, [*SERVING, DRAINING], WriteUnknown, _closed)


def _closed(state: Producer, event: Any, now: Instant, rules_: Rules) -> Result[Producer]:
    failed = WriteFailed(event.attempt, event.part)
    return producer_actions.write_failed(state, failed, now, rules_)


@taken_out
def settling_by_the_own_clock_alone(patch: Patch) -> None:
    """R14."""

    def settled_at(now: Instant, settle: Duration, bound: Duration | None, drift: int) -> Instant:
        return Instant(now + max(settle, bound or 0))

    patch.set(rules, "settled_at", settled_at)

"""The rules of the protocol, each taken out: a function replaced, or rows of a table.

The tables are frozen; a test that wants to know what a row is good for swaps it for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import pytest
from attrs import evolve

from pushkv.core import consumer_actions, producer_actions, producer_pieces, request, rules
from pushkv.core.capabilities import Capabilities
from pushkv.core.consumer import QUARANTINED, RELEASED, REVOKING, SETTLING, WAITING, Consumer
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.effects import (
    BlocksReleased,
    LinkDown,
    LinkUp,
    MemberOutcome,
    MemberTold,
    PermitGranted,
)
from pushkv.core.events import Permitted, Tick, Withdrawn, WriteFailed, WriteUnknown
from pushkv.core.ids import Duration, Instant, Worker
from pushkv.core.link import LINK, Link, LinkStatus
from pushkv.core.messages import AttemptMessage, Grant, Reason
from pushkv.core.producer import DRAINING, LIVE, Producer
from pushkv.core.producer_table import PRODUCER, SERVING
from pushkv.core.receiving import Receiving
from pushkv.core.request import Request
from pushkv.core.table import Result, Rules, Table, replace

Patch = pytest.MonkeyPatch
TAKEN_OUT: dict[str, Callable[[Patch], None]] = {}


def swap(
    patch: Patch,
    table: Table[Any],
    statuses: Iterable[StrEnum],
    event: type,
    action: Callable[..., Any] | None,
) -> None:
    """In `statuses`, `event` runs `action` and may end anywhere; without one it is ignored."""
    for status in statuses:
        row = table.rows[status, event]
        new = evolve(
            row,
            kind="ignore" if action is None else "go",
            action=action,
            targets=frozenset(table.statuses),
        )
        patch.setitem(table._rows, (status, event), new)


@contextmanager
def without(name: str) -> Iterator[None]:
    """While this lasts the rule is not in force."""
    with pytest.MonkeyPatch.context() as patch:
        TAKEN_OUT[name](patch)
        yield


def taken_out(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Register a way to take a rule out, under its name in words."""
    TAKEN_OUT[apply.__name__.replace("_", " ")] = apply
    return apply


def _free_now(state: Consumer, event: object, now: Instant, rules: Rules) -> Result[Consumer]:
    return consumer_actions._end(state, RELEASED, MemberOutcome.FAILED, Reason.CANCELLED)


@taken_out
def cancel_frees(patch: Patch) -> None:
    """R1."""
    swap(patch, CONSUMER, WAITING, Withdrawn, _free_now)


@taken_out
def link_end_frees(patch: Patch) -> None:
    """R2."""
    swap(patch, CONSUMER, (*WAITING, SETTLING, REVOKING), LinkDown, _free_now)


@taken_out
def no_permit(patch: Patch) -> None:
    """R3."""
    patch.setattr(rules, "may_post", lambda now, until, bound: True)


@taken_out
def permit_without_drift(patch: Patch) -> None:
    """R4."""
    patch.setattr(rules, "permit_end", lambda stamp, lease, drift: Instant(stamp + lease))


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
    patch.setattr(rules, "may_post", lambda now, until, bound: now <= until)


@taken_out
def fence_at_the_last_grant(patch: Patch) -> None:
    """R6."""
    patch.setattr(rules, "fence", lambda last_grant, lease: last_grant)


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
    patch.setattr(producer_actions, "verdict_of", lambda state, attempt: None)


@taken_out
def verdict_before_the_handles_close(patch: Patch) -> None:
    """R8."""
    wait = producer_pieces.drained

    def drained(state: Producer) -> Result[Producer]:
        return wait(replace(state, open=(), unknown=()))

    patch.setattr(producer_pieces, "drained", drained)
    patch.setattr(producer_actions, "drained", drained)


@taken_out
def any_attempt_will_do(patch: Patch) -> None:
    """R9."""
    routed = Receiving.message

    def message(self: Receiving, peer: Worker, message: AttemptMessage, now: Instant) -> list[Any]:
        live = [name for name in self.consumers.states if name.transfer == message.attempt.transfer]
        newest = max(live, key=lambda name: name.attempt, default=message.attempt)
        return routed(self, peer, evolve(message, attempt=newest), now)

    patch.setattr(Receiving, "message", message)


@taken_out
def coverage_unchecked(patch: Patch) -> None:
    """R10."""
    patch.setattr(rules, "covers", lambda parts, start, end: True)


@taken_out
def done_is_taken_for_visible(patch: Patch) -> None:
    """R10."""
    patch.setattr(rules, "proven", lambda parts, arrived, capabilities: True)


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

    patch.setattr(request, "_settle", eager)


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

    patch.setattr("pushkv.core.receiving.restart_grace", none)


@taken_out
def a_new_incarnation_proves_death(patch: Patch) -> None:
    """R14."""
    back = CONSUMER.rows[QUARANTINED, LinkUp].action
    assert back is not None

    def link_back(state: Consumer, event: LinkUp, now: Instant, rules_: Rules) -> Result[Consumer]:
        if event.peer != state.producer:
            return _free_now(state, event, now, rules_)
        result: Result[Consumer] = back(state, event, now, rules_)
        return result

    swap(patch, CONSUMER, [QUARANTINED], LinkUp, link_back)


@taken_out
def an_unknown_write_is_over(patch: Patch) -> None:
    """R14."""
    patch.setattr(rules, "unknown_closes_at", lambda now, bound: now)
    swap(patch, PRODUCER, [*SERVING, DRAINING], WriteUnknown, _closed)


def _closed(state: Producer, event: Any, now: Instant, rules_: Rules) -> Result[Producer]:
    failed = WriteFailed(event.attempt, event.part)
    return producer_actions.write_failed(state, failed, now, rules_)


@taken_out
def settling_by_the_own_clock_alone(patch: Patch) -> None:
    """R14."""

    def settled_at(now: Instant, settle: Duration, bound: Duration | None, drift: int) -> Instant:
        return Instant(now + max(settle, bound or 0))

    patch.setattr(rules, "settled_at", settled_at)

"""The rules of the protocol, each taken out: a function replaced, or rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from attrs import evolve

from pushkv.core import (
    consumer_actions,
    producer_actions,
    producer_pieces,
    receiving,
    request,
    rules,
    sending,
)
from pushkv.core.capabilities import Capabilities
from pushkv.core.consumer import QUARANTINED, RELEASED, REVOKING, SETTLING, WAITING, Consumer
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.effects import (
    BlocksReleased,
    Effect,
    LinkDown,
    LinkUp,
    MemberOutcome,
    MemberTold,
    PermitGranted,
)
from pushkv.core.events import (
    Permitted,
    PrefillAborted,
    RegistrationReceived,
    Tick,
    Withdrawn,
    WriteFailed,
    WriteUnknown,
)
from pushkv.core.ids import Duration, Instant, Worker
from pushkv.core.link import LINK, Link, LinkStatus
from pushkv.core.messages import AttemptMessage, Complete, Failed, Grant, Reason, Revoked, Verdict
from pushkv.core.producer import DRAINING, LIVE, Producer, Registration
from pushkv.core.producer_table import PRODUCER, SERVING
from pushkv.core.receiving import Receiving
from pushkv.core.request import Request
from pushkv.core.sending import ProducerKey, Sending
from pushkv.core.table import Result, Rules, Table, replace

from .patch import Patch

__all__ = ["MISSED_IN", "MISTAKES", "TAKEN_OUT", "rule_of"]

TAKEN_OUT: dict[str, Callable[[Patch], None]] = {}
"""The rules, by what it is like without them."""

MISTAKES: dict[str, Callable[[Patch], None]] = {}
"""Other ways to get the protocol wrong, each against a rule."""

MISSED_IN = {
    "cancel frees": "streaming",
    "link end frees": "ends",
    "no permit": "ends",
    "permit without drift": "drift",
    "permit from the grant": "ends",
    "write bound not counted": "ends",
    "fence at the last grant": "ends",
    "grant on an ended link": "ends",
    "nothing remembered": "weak-unbounded",
    "verdict before the handles close": "ends",
    "any attempt will do": "retry",
    "done is taken for visible": "weak",
    "new permit covers old registrations": "relink",
    "first rank frees": "two-writers-lost",
    "first rank delivers": "two-writers-lost",
    "no restart grace": "consumer-restart",
    "a new incarnation proves death": "producer-restart",
    "an unknown write is over": "unknown",
    "settling by the own clock alone": "drift-weak",
}
"""Configurations in which a rule is missed after few states."""


def rule_of(name: str) -> str:
    """Which rule is not in force: the first word of what is said about it."""
    said = (TAKEN_OUT | MISTAKES)[name].__doc__ or ""
    return said.split(".")[0].split(":")[0].strip()


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
        patch.row(table, new)


def taken_out(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Register a way to take a rule out, under its name in words."""
    TAKEN_OUT[apply.__name__.replace("_", " ")] = apply
    return apply


def mistake(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Register a mistake, under its name in words."""
    MISTAKES[apply.__name__.replace("_", " ")] = apply
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
            return _free_now(state, event, now, rules_)
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


# -- mistakes beyond the rules


@mistake
def the_newest_link_has_the_fence(patch: Patch) -> None:
    """R6: any link's end sets the fence of a quarantined attempt."""

    def link_down(
        state: Consumer, event: LinkDown, now: Instant, rules_: Rules
    ) -> Result[Consumer]:
        mine = LinkDown(state.epoch or event.epoch, event.peer, event.fence)
        return consumer_actions.link_down(state, mine, now, rules_)

    swap(patch, CONSUMER, [QUARANTINED], LinkDown, link_down)


@mistake
def any_grant_will_do(patch: Patch) -> None:
    """R4: an answer to a PING of long ago counts from now, whatever its stamp."""
    taken = LINK.rows[LinkStatus.UP, Grant].action
    assert taken is not None

    def granted(state: Link, event: Grant, now: Instant, rules_: Rules) -> Result[Link]:
        fresh = replace(state, stamps=(int(now),))
        return taken(fresh, evolve(event, stamp=int(now)), now, rules_)

    swap(patch, LINK, [LinkStatus.UP], Grant, granted)


@mistake
def a_verdict_frees_without_arrivals(patch: Patch) -> None:
    """R14: what was done at the producer is taken for over at the consumer, once revoked."""
    for verdict in (Complete, Failed, Revoked):
        swap(patch, CONSUMER, [REVOKING], verdict, _free_now)


@mistake
def parts_are_forgotten_when_the_link_ends(patch: Patch) -> None:
    """R11: the parts that were DONE are not named in the verdict after a link's end."""
    real = producer_actions.link_down

    def link_down(
        state: Producer, event: LinkDown, now: Instant, rules_: Rules
    ) -> Result[Producer]:
        return real(replace(state, done=()), event, now, rules_)

    swap(patch, PRODUCER, LIVE, LinkDown, link_down)


@mistake
def part_numbers_are_used_again(patch: Patch) -> None:
    """R10: a WRITE that is ordered anew has the number of the one that failed."""
    real = producer_pieces.order

    def order(state: Producer) -> Result[Producer]:
        return real(state if state.open else replace(state, next_part=0))

    patch.set(producer_pieces, "order", order)


@mistake
def what_was_ordered_is_kept_for_the_next_attempt(patch: Patch) -> None:
    """R10: a new attempt finds the tokens of an older one ordered already."""
    real = producer_pieces.end_attempt

    def end_attempt(state: Producer, verdict: Verdict, send: bool) -> Result[Producer]:
        after, effects = real(state, verdict, send)
        return replace(after, ordered=state.ordered), effects

    for module in (producer_pieces, producer_actions):
        patch.set(module, "end_attempt", end_attempt)


@mistake
def abort_without_a_drain(patch: Patch) -> None:
    """R8: an aborted request gives its source back at once."""

    def aborted(
        state: Producer, event: PrefillAborted, now: Instant, rules_: Rules
    ) -> Result[Producer]:
        return producer_actions.aborted(replace(state, open=(), unknown=()), event, now, rules_)

    swap(patch, PRODUCER, SERVING, PrefillAborted, aborted)


@mistake
def failed_parts_are_owed(patch: Patch) -> None:
    """R8: a part that failed is named among those that are done."""
    real = producer_actions.write_failed

    def write_failed(
        state: Producer, event: WriteFailed, now: Instant, rules_: Rules
    ) -> Result[Producer]:
        failed = tuple(part for part in state.open if part.number == event.part)
        return real(replace(state, done=(*state.done, *failed)), event, now, rules_)

    swap(patch, PRODUCER, [*SERVING, DRAINING], WriteFailed, write_failed)


@mistake
def exposure_is_not_counted(patch: Patch) -> None:
    """I4: blocks that may be written are not counted as exposed."""
    patch.set(receiving, "block_count", lambda blocks: 0)


@mistake
def the_source_is_free_when_registered_ranks_are(patch: Patch) -> None:
    """R12: the producer knows only the consumer ranks that have registered so far."""
    real = Sending._register

    def register(
        self: Sending, key: ProducerKey, news: RegistrationReceived, now: Instant
    ) -> list[Effect]:
        alone = evolve(news.register, consumer_ranks=(key[1],))
        return real(self, key, evolve(news, register=alone), now)

    patch.set(sending.Sending, "_register", register)


@mistake
def no_producer_rank(patch: Patch) -> None:
    """R9: a message is taken for the first producer rank, whichever sent it."""

    def message(
        self: Receiving, peer: Worker, message: AttemptMessage, now: Instant
    ) -> list[Effect]:
        named = (message.attempt.transfer, message.attempt.attempt)
        live = [name for name in self.consumers.states if (name.transfer, name.attempt) == named]
        if not live or not isinstance(message, receiving.TO_CONSUMER):
            return []
        return self._step(min(live), message, now)

    patch.set(Receiving, "message", message)


@mistake
def an_older_incarnation_is_served(patch: Patch) -> None:
    """R9: a registration is answered over whatever link its consumer has now."""
    real = producer_actions.register

    def register(
        state: Producer, event: RegistrationReceived, now: Instant, rules_: Rules
    ) -> Result[Producer]:
        served = state.registration
        if served is not None and served.epoch != event.epoch:
            moved = Registration(event.register, event.epoch, event.consumer)
            return real(replace(state, registration=moved), event, now, rules_)
        return real(state, event, now, rules_)

    swap(patch, PRODUCER, LIVE, RegistrationReceived, register)

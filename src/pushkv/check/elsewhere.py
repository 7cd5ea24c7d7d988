"""Mistakes that others have made with transfers like these; `docs/mistakes.md` says where."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import evolve

from pushkv.core import consumer_actions, producer_actions, producer_pieces, request, rules
from pushkv.core.capabilities import Capabilities
from pushkv.core.consumer import (
    QUARANTINED,
    REGISTERED,
    REGISTERING,
    REVOKING,
    WAITING,
    Consumer,
)
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.copies import replace
from pushkv.core.effects import Effect, LinkDown, LinkUp, MemberTold
from pushkv.core.events import (
    ArrivalSeen,
    Offered,
    RegistrationReceived,
    Tick,
    Withdrawn,
    WriteFailed,
)
from pushkv.core.ids import FOREVER, AttemptId, Instant, Part, Worker
from pushkv.core.links import LinkReady
from pushkv.core.messages import AttemptMessage, Reason, Register
from pushkv.core.producer import (
    DONE,
    DRAINING,
    EXPIRED,
    HOLDING,
    LIVE,
    NOTIFYING,
    WRITING,
    Producer,
)
from pushkv.core.producer_table import PRODUCER, SERVING
from pushkv.core.receiving import Receiving
from pushkv.core.request import REQUEST, RequestStatus
from pushkv.core.table import Result, Rules

from .patch import Apply, Patch, named_in, swap
from .taken_out import free_now

__all__ = ["ELSEWHERE"]

ELSEWHERE: dict[str, Apply] = {}
"""By name."""

mistake: Callable[[Apply], Apply] = named_in(ELSEWHERE)


# -- blocks are given back too early


@mistake
def a_time_out_frees(patch: Patch) -> None:
    """R14: whoever has waited too long takes its blocks back."""
    ticks = {status: CONSUMER.rows[status, Tick].action for status in (REGISTERED, REVOKING)}

    def tick(state: Consumer, event: Tick, now: Instant, rules_: Rules) -> Result[Consumer]:
        if now >= state.deadline_at:
            return free_now(state, event, now, rules_)
        action = ticks[state.status]
        assert action is not None
        result: Result[Consumer] = action(state, event, now, rules_)
        return result

    swap(patch, CONSUMER, [REGISTERED, REVOKING], Tick, tick)


@mistake
def a_new_link_frees(patch: Patch) -> None:
    """R2: when the producer is back, whatever it was doing is taken for over."""
    swap(patch, CONSUMER, [QUARANTINED], LinkUp, free_now)


@mistake
def a_hold_ends_under_a_write(patch: Patch) -> None:
    """I1: the source is given back when its time is over, whoever reads it."""

    def tick(state: Producer, event: Tick, now: Instant, rules_: Rules) -> Result[Producer]:
        over = replace(state, status=EXPIRED, timer_at=FOREVER, transfer_until=FOREVER)
        return producer_pieces.free(over)

    swap(patch, PRODUCER, [WRITING], Tick, tick)


@mistake
def what_is_in_flight_is_forgotten_with_the_link(patch: Patch) -> None:
    """R11: a peer that is gone is cleaned up after, with the WRITEs that go there."""

    def link_down(
        state: Producer, event: LinkDown, now: Instant, rules_: Rules
    ) -> Result[Producer]:
        return producer_actions.link_down(replace(state, open=()), event, now, rules_)

    swap(patch, PRODUCER, LIVE, LinkDown, link_down)


@mistake
def the_first_error_closes_the_others(patch: Patch) -> None:
    """R8: when one WRITE has failed the verdict leaves, whatever its siblings do."""

    def write_failed(
        state: Producer, event: WriteFailed, now: Instant, rules_: Rules
    ) -> Result[Producer]:
        alone = tuple(part for part in state.open if part.number == event.part)
        return producer_actions.write_failed(replace(state, open=alone), event, now, rules_)

    swap(patch, PRODUCER, SERVING, WriteFailed, write_failed)


@mistake
def what_was_given_back_is_served_again(patch: Patch) -> None:
    """R7: a new attempt is served from a source that another has had."""

    def register(
        state: Producer, event: RegistrationReceived, now: Instant, rules_: Rules
    ) -> Result[Producer]:
        held = replace(state, status=HOLDING)
        return producer_actions.register(held, event, now, rules_)

    swap(patch, PRODUCER, [NOTIFYING, DONE], RegistrationReceived, register)


# -- success is taken for granted


@mistake
def arrivals_are_counted(patch: Patch) -> None:
    """R10: as many arrivals as parts are all of them, and one that comes twice is two."""

    def arrival(
        state: Consumer, event: ArrivalSeen, now: Instant, rules_: Rules
    ) -> Result[Consumer]:
        fresh = max(state.arrived, default=-1) + 1 if event.part in state.arrived else event.part
        return consumer_actions.arrival(state, evolve(event, part=fresh), now, rules_)

    def proven(parts: Iterable[Part], arrived: Iterable[int], capabilities: Capabilities) -> bool:
        return capabilities.done_means_visible or len(set(arrived)) >= len(tuple(parts))

    for status in CONSUMER.statuses:
        if CONSUMER.rows[status, ArrivalSeen].kind == "go":
            swap(patch, CONSUMER, [status], ArrivalSeen, arrival)
    patch.set(rules, "proven", proven)


@mistake
def a_late_success_revives(patch: Patch) -> None:
    """I3: an attempt that was given up is delivered after all."""
    told = request._told
    swap(patch, REQUEST, [RequestStatus.RELEASING], MemberTold, told)


# -- one waits for ever, or is not told


@mistake
def a_failed_write_ends_nothing(patch: Patch) -> None:
    """I7: a WRITE that fails is noted, and nobody is told."""
    swap(patch, PRODUCER, [*SERVING, DRAINING], WriteFailed, None)


@mistake
def a_hold_has_no_end(patch: Patch) -> None:
    """I7: a source that nobody comes for is kept."""
    swap(patch, PRODUCER, [HOLDING], Tick, None)


@mistake
def a_quarantine_has_no_end(patch: Patch) -> None:
    """I7: blocks whose writer is gone are kept, whatever is known of it."""
    swap(patch, CONSUMER, [QUARANTINED], Tick, None)


@mistake
def whoever_is_unreachable_is_waited_for(patch: Patch) -> None:
    """I7: there is no time within which a producer must be reached."""

    def tick(state: Consumer, event: Tick, now: Instant, rules_: Rules) -> Result[Consumer]:
        patient = replace(state, deadline_at=FOREVER)
        return consumer_actions.tick_registering(patient, event, now, rules_)

    swap(patch, CONSUMER, [REGISTERING], Tick, tick)


@mistake
def a_cancel_is_not_sent(patch: Patch) -> None:
    """I7: the producer of a request that is given up early is never told."""
    swap(patch, CONSUMER, WAITING, Withdrawn, None)


@mistake
def nothing_to_transfer_is_not_told(patch: Patch) -> None:
    """I7: a request that is all cached waits for bytes that never come."""
    real = consumer_actions.offer

    def offer(register: Register, now: Instant, rules_: Rules) -> Result[Consumer]:
        return real(register, now, rules_)[0], ()

    patch.set(consumer_actions, "offer", offer)


# -- input is trusted


@mistake
def late_input_raises(patch: Patch) -> None:
    """I5: what comes for an attempt that is over is looked up as if it were not."""
    real = Receiving.message

    def message(
        self: Receiving, peer: Worker, message: AttemptMessage, now: Instant
    ) -> list[Effect]:
        assert message.attempt in self.consumers.states, message.attempt
        return real(self, peer, message, now)

    patch.set(Receiving, "message", message)


@mistake
def whoever_answers_is_asked(patch: Patch) -> None:
    """R9: blocks are registered with any engine that listens at the address."""

    def link_ready(
        self: Receiving, attempt: AttemptId, ready: LinkReady, now: Instant
    ) -> list[Effect]:
        return self._step(attempt, ready.up, now)

    patch.set(Receiving, "_link_ready", link_ready)


@mistake
def samples_share_a_transfer(patch: Patch) -> None:
    """I3: a transfer that is under way is offered once more, with other blocks."""
    real = Receiving._refusal

    def refusal(self: Receiving, event: Offered, now: Instant) -> Reason | None:
        reason = real(self, event, now)
        return None if reason is Reason.DUPLICATE else reason

    patch.set(Receiving, "_refusal", refusal)

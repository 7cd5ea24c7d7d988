"""Mistakes that the machines could make beyond a rule that is missing, each against a rule."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from pushkv.core import (
    consumer_actions,
    producer_actions,
    producer_pieces,
    receiving,
    sending,
)
from pushkv.core.consumer import QUARANTINED, REGISTERED, REVOKING, Consumer
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.copies import replace
from pushkv.core.effects import (
    Counted,
    Effect,
    LinkDown,
    MemberTold,
    ProducerAddress,
    SourceFreed,
    SourceReleased,
)
from pushkv.core.events import (
    ArrivalSeen,
    Cancelled,
    Offered,
    PrefillAborted,
    PrefillPreempted,
    RegistrationReceived,
    Tick,
    WriteClosed,
    WriteFailed,
)
from pushkv.core.ids import FOREVER, Instant, Worker
from pushkv.core.link import LINK, Link, LinkStatus
from pushkv.core.links import LinkLost, LinkReady, LinkRefused
from pushkv.core.messages import (
    AttemptMessage,
    Complete,
    Failed,
    Grant,
    Reason,
    Revoke,
    Revoked,
    Verdict,
)
from pushkv.core.producer import (
    DRAINING,
    EXPECTED,
    LIVE,
    PREFILLING,
    WRITING,
    Producer,
    Registration,
)
from pushkv.core.producer_table import PRODUCER, SERVING
from pushkv.core.receiving import Receiving
from pushkv.core.request import REQUEST, Request, RequestStatus
from pushkv.core.sending import ProducerKey, Sending
from pushkv.core.table import Result, Rules

from .patch import Apply, Patch, named_in, swap
from .taken_out import free_now

__all__ = ["MISTAKES"]

MISTAKES: dict[str, Apply] = {}
"""By name."""

mistake: Callable[[Apply], Apply] = named_in(MISTAKES)


@mistake
def the_newest_link_has_the_fence(patch: Patch) -> None:
    """R6: any link's end sets the fence of an attempt that waits for its verdict."""

    def link_down(
        state: Consumer, event: LinkDown, now: Instant, rules_: Rules
    ) -> Result[Consumer]:
        mine = LinkDown(state.epoch or event.epoch, event.peer, event.fence)
        return consumer_actions.link_down(state, mine, now, rules_)

    swap(patch, CONSUMER, [REVOKING, QUARANTINED], LinkDown, link_down)


@mistake
def one_fence_per_engine(patch: Patch) -> None:
    """R6: the end of one rank's link sets the fence of what is registered with its siblings."""
    real = Receiving.link_news

    def link_news(
        self: Receiving, news: LinkReady | LinkLost | LinkRefused, now: Instant
    ) -> list[Effect]:
        out = real(self, news, now)
        if not isinstance(news, LinkLost) or not isinstance(news.key, ProducerAddress):
            return out
        for attempt in list(self.consumers.states):
            state = self.consumers.states.get(attempt)
            if state is None or state.epoch is None or state.producer is None:
                continue
            if state.producer.engine == news.down.peer.engine and state.epoch != news.down.epoch:
                down = LinkDown(state.epoch, state.producer, news.down.fence)
                out += self._step(attempt, down, now)
        return out

    patch.set(Receiving, "link_news", link_news)


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
        swap(patch, CONSUMER, [REVOKING], verdict, free_now)


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
def what_was_computed_is_kept_when_preempted(patch: Patch) -> None:
    """I1: whoever registers while a prefill is preempted is written from blocks that are gone."""

    def preempted(
        state: Producer, event: PrefillPreempted, now: Instant, rules_: Rules
    ) -> Result[Producer]:
        after, effects = producer_actions.preempted(state, event, now, rules_)
        return replace(after, computed=state.computed), effects

    swap(patch, PRODUCER, [PREFILLING], PrefillPreempted, preempted)


@mistake
def part_numbers_are_used_again(patch: Patch) -> None:
    """R10: a WRITE that is ordered anew has the number of the one that failed."""
    real = producer_pieces.order

    def order(state: Producer, rules_: Rules) -> Result[Producer]:
        return real(state if state.open else replace(state, next_part=0), rules_)

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
def a_registration_takes_the_place_of_one_that_drains(patch: Patch) -> None:
    """R8: a new attempt does not wait until the handles of the older one are closed."""
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


@mistake
def no_consumer_rank(patch: Patch) -> None:
    """R9: a completion closes the part of its number for whichever consumer rank has it open."""
    real = Sending.closed

    def closed(self: Sending, event: WriteClosed, now: Instant) -> list[Effect]:
        for (transfer, _), state in self.producers.states.items():
            served = state.registration
            if transfer != event.attempt.transfer or served is None:
                continue
            if any(part.number == event.part for part in state.open):
                event = evolve(event, attempt=served.register.attempt)
                break
        return real(self, event, now)

    patch.set(Sending, "closed", closed)


@mistake
def attempts_count_from_zero(patch: Patch) -> None:
    """R9: each attempt has the number that the first one had."""
    real = Receiving.offered

    def offered(self: Receiving, event: Offered, now: Instant) -> list[Effect]:
        out = real(self, event, now)
        self._attempt_max = -1
        return out

    patch.set(Receiving, "offered", offered)


@mistake
def a_grant_names_no_incarnation(patch: Patch) -> None:
    """R4: a GRANT counts whoever gave it, and to whom."""
    taken = LINK.rows[LinkStatus.UP, Grant].action
    assert taken is not None

    def granted(state: Link, event: Grant, now: Instant, rules_: Rules) -> Result[Link]:
        theirs = event.consumer_incarnation if state.peer is None else state.peer.incarnation
        mine = evolve(event, producer_incarnation=state.incarnation, consumer_incarnation=theirs)
        return taken(state, mine, now, rules_)

    swap(patch, LINK, [LinkStatus.UP], Grant, granted)


@mistake
def arrivals_are_void_with_their_link(patch: Patch) -> None:
    """R9: an arrival counts only while its attempt's link is up."""
    real = Receiving.arrival

    def arrival(self: Receiving, event: ArrivalSeen, now: Instant) -> list[Effect]:
        state = self.consumers.states.get(event.attempt)
        if state is not None:
            up = self._links.up(self._address[event.attempt])
            if up is None or up.epoch != state.epoch:
                return [Counted("void", "ArrivalSeen")]
        return real(self, event, now)

    patch.set(Receiving, "arrival", arrival)


@mistake
def a_cancel_is_ignored_before_a_retry(patch: Patch) -> None:
    """I3: whoever gives a request up while its retry is due is not heard."""
    swap(patch, REQUEST, [RequestStatus.RETRYING], Cancelled, None)


@mistake
def a_revoke_is_unanswered_before_the_request_comes(patch: Patch) -> None:
    """I7: REVOKE is not answered in EXPECTED."""
    swap(patch, PRODUCER, [EXPECTED], Revoke, None)


# -- of what the machines say and wait for


@mistake
def waiting_has_no_end(patch: Patch) -> None:
    """I7: as long as its link lives, a registered attempt waits."""

    def tick(state: Consumer, event: Tick, now: Instant, rules_: Rules) -> Result[Consumer]:
        patient = replace(state, deadline_at=FOREVER)
        return consumer_actions.tick_registered(patient, event, now, rules_)

    swap(patch, CONSUMER, [REGISTERED], Tick, tick)


@mistake
def a_revoke_is_waited_for_without_an_end(patch: Patch) -> None:
    """I7: a link over which REVOKE stays unanswered is not suspected."""

    def tick(state: Consumer, event: Tick, now: Instant, rules_: Rules) -> Result[Consumer]:
        patient = replace(state, deadline_at=FOREVER)
        return consumer_actions.tick_revoking(patient, event, now, rules_)

    swap(patch, CONSUMER, [REVOKING], Tick, tick)


@mistake
def a_write_is_waited_for_without_an_end(patch: Patch) -> None:
    """I7: there is no transfer clock; WRITEs wait for their permit."""
    swap(patch, PRODUCER, [WRITING], Tick, None)


@mistake
def late_input_is_not_counted(patch: Patch) -> None:
    """I5: what comes for an attempt that is over is dropped without a trace."""
    real = Receiving.message

    def message(
        self: Receiving, peer: Worker, message: AttemptMessage, now: Instant
    ) -> list[Effect]:
        found = real(self, peer, message, now)
        return [each for each in found if each != Counted("late", type(message).__name__)]

    patch.set(Receiving, "message", message)


@mistake
def a_repeated_registration_is_served_again(patch: Patch) -> None:
    """I5: REGISTER of the attempt being served begins it anew."""
    real = producer_actions.register

    def register(
        state: Producer, event: RegistrationReceived, now: Instant, rules_: Rules
    ) -> Result[Producer]:
        if producer_pieces.serves(state, event.register.attempt):
            state = replace(state, registration=None, ordered=0)
        return real(state, event, now, rules_)

    swap(patch, PRODUCER, [PREFILLING, WRITING], RegistrationReceived, register)


@mistake
def the_reason_is_lost_on_the_way(patch: Patch) -> None:
    """I8: the consumer tells that it failed, and not why the producer said it did."""
    patch.set(consumer_actions, "_reason", lambda verdict: Reason.UNKNOWN)


@mistake
def siblings_blame_each_other(patch: Patch) -> None:
    """I8: the attempt fails because a member of it did, whatever that one failed of."""
    told = REQUEST.rows[RequestStatus.RECEIVING, MemberTold].action
    assert told is not None

    def blamed(state: Request, event: MemberTold, now: Instant, rules_: Rules) -> Result[Request]:
        several = len(state.members) > 1 and event.reason is not None
        return told(state, evolve(event, reason=Reason.SIBLING) if several else event, now, rules_)

    swap(patch, REQUEST, [RequestStatus.RECEIVING], MemberTold, blamed)


@mistake
def an_expired_source_is_told_as_any_other(patch: Patch) -> None:
    """I8: whether anybody came for a source before its hold time was over is not told."""
    real = Sending._freed

    def freed(self: Sending, effect: SourceFreed) -> list[Effect]:
        return [
            evolve(each, reason=None) if isinstance(each, SourceReleased) else each
            for each in real(self, effect)
        ]

    patch.set(Sending, "_freed", freed)

"""How long, and how much, a producer holds for consumers that may not come."""

from __future__ import annotations

from attrs import evolve

from pushkv.core.events import Cancelled, MessageReceived, TakenBack
from pushkv.core.ids import seconds
from pushkv.core.messages import Revoke
from pushkv.core.producer import ProducerStatus
from pushkv.testing.world import POLICY, STRONG_UNBOUNDED

from .stage import A, attempt_of, flying, producer_state, registered, sent


def test_a_source_whose_consumer_gave_up_is_not_held_for_long() -> None:
    world, consumer, producer = registered()
    write = flying(world)
    world.happen(consumer, Cancelled(A))
    world.settle()
    assert sent(consumer, Revoke)[-1].final
    world.close(write, "failed")
    world.settle()
    assert producer_state(producer).status is ProducerStatus.HOLDING
    world.advance(POLICY.hold_cancelled - 1)
    assert not producer.released_sources, "another decode engine may follow at once"
    world.advance(seconds(0.1))
    assert [report.reason for report in producer.released_sources] == ["expired"]


def test_an_attempt_that_may_be_repeated_does_not_give_the_source_up() -> None:
    world, consumer, producer = registered()
    write = flying(world)
    world.happen(consumer, TakenBack(A))
    world.settle()
    assert not sent(consumer, Revoke)[-1].final
    world.close(write, "failed")
    world.settle()
    world.advance(2 * POLICY.hold_cancelled)
    assert not producer.released_sources


def test_a_cancel_is_still_final_when_it_is_asked_again_over_another_link() -> None:
    world, consumer, producer = registered(STRONG_UNBOUNDED)
    write = flying(world)
    world.happen(consumer, Cancelled(A))
    world.reset(world.wire(consumer, producer))
    world.advance(seconds(1))
    world.close(write, "failed")
    world.settle()
    assert all(message.final for message in sent(consumer, Revoke))
    assert len(sent(consumer, Revoke)) == 2


def test_who_is_not_served_cannot_give_up_what_another_is_served_from() -> None:
    world, consumer, producer = registered()
    flying(world)
    hold = producer_state(producer).hold_until
    name = attempt_of(consumer, producer, 99)
    wire = world.wire(consumer, producer)
    world.happen(producer, MessageReceived(wire.number, Revoke(name, final=True)))
    assert producer_state(producer).hold_until == hold


def test_finished_prefills_pin_no_more_than_their_budget() -> None:
    world, consumer, producer = registered(policy=evolve(POLICY, pinned_blocks=5))
    for name in ("b", "c"):
        world.prefill(producer, name)
    sending = producer.endpoint.sending
    assert sending.transfers() == (A, "c"), "the oldest that nobody has registered for"
    assert sending.pinned_blocks == 4
    assert [report.reason for report in producer.released_sources] == ["budget_spent"]
    world.offer(consumer, "b", [producer])
    world.settle()
    assert world.reason(consumer, "b", 1) == "aborted"
    world.finish(world.ordered()[0])
    world.settle()
    world.advance(POLICY.hold)
    assert sending.pinned_blocks == 0


def test_what_is_served_and_what_is_latest_stay_pinned_beyond_the_budget() -> None:
    world, consumer, producer = registered(policy=evolve(POLICY, pinned_blocks=1))
    world.prefill(producer, "b")
    assert producer.endpoint.sending.transfers() == (A, "b")
    world.finish(world.ordered()[0])
    world.settle()
    assert world.delivered(consumer, "a")

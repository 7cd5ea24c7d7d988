"""One endpoint and its peers: routing, fencing, bounds, links, ranks, deadlines."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from pushkv.core.effects import (
    BlocksReleased,
    Counted,
    Hangup,
    NotDelivered,
    ProducerAddress,
    Transmit,
)
from pushkv.core.errors import LocalProtocolError
from pushkv.core.events import (
    ArrivalSeen,
    Arrived,
    Cancelled,
    ConnectionOpened,
    MessageReceived,
    PrefillAborted,
    Tick,
    WriteClosed,
)
from pushkv.core.ids import (
    FOREVER,
    Instant,
    Part,
    seconds,
)
from pushkv.core.messages import (
    Complete,
    Failed,
    Grant,
    Hello,
    Ping,
    Progress,
    Query,
    Reason,
    Received,
    Register,
    Registered,
    Revoke,
    Revoked,
    Unproven,
)
from pushkv.testing.world import (
    POLICY,
    WEAK,
    Node,
    Offer,
    Owner,
    World,
    Write,
    pair,
)

from .stage import (
    A,
    attempt_of,
    consumer_state,
    offered,
    producer_state,
    registered,
    sent,
)

# -- R9: names and fences

WRONG: dict[str, Any] = {
    "consumer": "x",
    "consumer_incarnation": 5,
    "consumer_rank": 3,
    "producer_rank": 3,
    "transfer": "x",
    "attempt": 3,
}


@pytest.mark.parametrize("field", WRONG)
@pytest.mark.parametrize("message", [Complete, Revoked, Unproven, Registered])
def test_a_stale_message_changes_nothing_at_the_consumer(field: str, message: type) -> None:
    world, consumer, producer = registered()
    before = consumer_state(consumer)
    name = evolve(before.attempt, **{field: WRONG[field]})
    parts = () if message is Registered else ((Part(0, 0, 8),),)
    counted = consumer.counted["fenced"] + consumer.counted["late"]
    world.send(world.wire(consumer, producer), consumer, message(name, *parts))
    world.settle()
    assert consumer_state(consumer) is before
    assert consumer.counted["fenced"] + consumer.counted["late"] == counted + 1
    assert world.outcome(consumer, "a", 0) is None


@pytest.mark.parametrize(
    "field", ["consumer", "consumer_incarnation", "consumer_rank", "producer_rank"]
)
@pytest.mark.parametrize("message", [Register, Query, Revoke, Received])
def test_a_stale_message_changes_nothing_at_the_producer(field: str, message: type) -> None:
    world, consumer, producer = registered()
    before = producer_state(producer)
    name = evolve(attempt_of(consumer, producer), **{field: WRONG[field]})
    whole = evolve(consumer_state(consumer).register, attempt=name)
    world.send(
        world.wire(consumer, producer), producer, whole if message is Register else message(name)
    )
    world.settle()
    assert producer_state(producer) is before
    assert producer.counted["fenced"] == 1
    assert len(producer.endpoint.sending.producers.states) == 1


@pytest.mark.parametrize("field", WRONG)
def test_a_stale_arrival_changes_nothing(field: str) -> None:
    world, consumer, _ = registered(WEAK)
    before = consumer_state(consumer)
    name = evolve(before.attempt, **{field: WRONG[field]})
    world.happen(consumer, ArrivalSeen(name, 0, before.register.arrival_token))
    assert consumer_state(consumer) is before
    assert consumer.counted["late"] == 1


def test_an_arrival_with_another_token_changes_nothing() -> None:
    world, consumer, _ = registered(WEAK)
    before = consumer_state(consumer)
    world.happen(consumer, ArrivalSeen(before.attempt, 0, before.register.arrival_token + 1))
    assert consumer_state(consumer) is before
    assert consumer.counted["forged_arrival"] == 1


def test_an_arrival_that_comes_twice_is_counted() -> None:
    world, consumer, _ = registered(WEAK)
    seen = ArrivalSeen(consumer_state(consumer).attempt, 0, 0)
    seen = evolve(seen, token=consumer_state(consumer).register.arrival_token)
    world.happen(consumer, seen)
    before = consumer_state(consumer)
    world.happen(consumer, seen)
    assert consumer_state(consumer) is before
    assert consumer.counted["repeated_arrival"] == 1


def test_what_a_peer_says_and_a_row_ignores_is_counted() -> None:
    world, consumer, producer = registered()
    world.happen(consumer, Cancelled(A))
    before = consumer_state(consumer)
    late = Progress(before.attempt, 4)
    world.send(world.wire(consumer, producer), consumer, late)
    world.settle()
    assert consumer_state(consumer) == before
    assert consumer.counted["ignored"] == 1
    assert producer.counted["ignored"] == 0, "what one's own machines ignore is no input"


@pytest.mark.parametrize("outcome", ["done", "failed", "refused", "unknown"])
@pytest.mark.parametrize("field", WRONG)
def test_a_completion_of_another_attempt_closes_nothing(field: str, outcome: str) -> None:
    world, consumer, producer = registered()
    before = producer_state(producer)
    name = evolve(attempt_of(consumer, producer), **{field: WRONG[field]})
    world.happen(producer, WriteClosed(name, 0, outcome))
    assert producer_state(producer) is before
    assert before.open
    assert producer.counted["stale_completion"] == 1


def test_a_completion_has_one_of_four_outcomes() -> None:
    world, consumer, producer = registered()
    with pytest.raises(LocalProtocolError, match="'lost': expected"):
        world.happen(producer, WriteClosed(attempt_of(consumer, producer), 0, "lost"))


def test_messages_for_the_other_half_are_counted() -> None:
    world, consumer, producer = registered()
    wire = world.wire(consumer, producer)
    world.send(wire, consumer, Revoke(attempt_of(consumer, producer)))
    world.send(wire, producer, Revoked(attempt_of(consumer, producer), ()))
    world.settle()
    assert consumer.counted["fenced"] == 1
    assert producer.counted["fenced"] == 1


def test_a_message_before_hello_is_void() -> None:
    world, consumer, producer = pair()
    producer.endpoint.handle(ConnectionOpened(5, 1, None), world.local(producer))
    effects = producer.endpoint.handle(
        MessageReceived(5, Query(attempt_of(consumer, producer))), world.local(producer)
    )
    assert effects == [Counted("void_message", "Query"), Hangup(5)]
    assert not producer.endpoint.sending.producers.states


# -- what the engine may offer


def test_attempt_numbers_are_used_once() -> None:
    world, consumer, producer = pair()
    consumer.attempts = 7
    world.offer(consumer, "b", [producer])
    for number in (7, 3):
        with pytest.raises(LocalProtocolError, match="each used once"):
            world.happen(consumer, offered(producer, attempt=number))
    assert len(consumer.endpoint.receiving.requests.states) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"producers": ()}, "one address per producer rank"),
        (
            {"producers": (ProducerAddress("p", 1), ProducerAddress("q", 1))},
            "one address per producer rank",
        ),
        ({"start": 9}, r"tokens \[9, 8\)"),
        ({"start": -1}, r"tokens \[-1, 8\)"),
        ({"consumer_ranks": (1, 2)}, "of which this is 0"),
        ({"served": ((1,),)}, r"served = \(\(1,\),\): .*, of which this is 0"),
        ({"served": ((0,), (0,))}, "expected for each producer the consumer ranks"),
    ],
)
def test_an_offer_that_contradicts_itself_is_ours_to_mend(
    changes: dict[str, Any], why: str
) -> None:
    _, consumer, producer = pair()
    endpoint = consumer.endpoint
    with pytest.raises(LocalProtocolError, match=why):
        endpoint.handle(offered(producer, **changes), Instant(0))
    assert not endpoint.receiving.requests.states
    assert endpoint.receiving.exposed_blocks == 0


def test_a_live_transfer_is_not_offered_twice() -> None:
    world, consumer, producer = registered()
    world.offer(consumer, "a", [producer])
    assert consumer.reports[-2:] == [
        NotDelivered(A, 1, Reason.DUPLICATE, False),
        BlocksReleased(A, 1),
    ]
    world.finish(flying_or_ordered(world))
    world.settle()
    assert world.delivered(consumer, "a", 0)


def flying_or_ordered(world: World) -> Write:
    return [*world.ordered(), *world.flying()][0]


def test_exposed_blocks_stay_within_the_budget() -> None:
    world, consumer, producer = registered(policy=evolve(POLICY, exposed_blocks=5))
    second = world.offer(consumer, "b", [producer])
    third = world.offer(consumer, "c", [producer])
    assert second is not None
    assert third is not None
    assert world.outcome(consumer, "b", second) is None
    assert world.reason(consumer, "c", third) == "budget_spent"
    assert world.released(consumer, "c", third)
    world.happen(consumer, Cancelled(A))
    world.settle()
    assert consumer.endpoint.receiving.exposed_blocks == 4, "still being written"
    world.close(world.ordered()[0], "failed")
    world.settle()
    assert world.outcome(consumer, "d", world.offer(consumer, "d", [producer]) or 0) is None


def test_two_producer_ranks_expose_the_same_blocks_once() -> None:
    world = World(policy=evolve(POLICY, exposed_blocks=2), auto=False)
    consumer = world.node("d")
    producers = [world.node(f"p{rank}", rank=rank) for rank in (0, 1)]
    world.offer(consumer, "a", producers)
    assert consumer.endpoint.receiving.exposed_blocks == 2


def test_live_transfers_are_bounded_at_the_consumer() -> None:
    world, consumer, producer = registered(policy=evolve(POLICY, transfers=1))
    world.offer(consumer, "b", [producer])
    assert world.reason(consumer, "b", 1) == "too_many_transfers"


def test_registrations_are_bounded_at_the_producer() -> None:
    world = World(auto=True)
    consumer = world.node("d")
    producer = world.node("p", policy=evolve(POLICY, transfers=1))
    world.prefill(producer, "a")
    for name in ("b", "a", "c"):
        world.offer(consumer, name, [producer])
    world.settle()
    assert set(producer.endpoint.sending.producers.states) == {("a", 0)}
    assert world.delivered(consumer, "a", 1)
    world.advance(seconds(1.1))
    assert ("b", 0) in producer.endpoint.sending.producers.states, "resent, and there is room now"


def test_what_is_over_is_remembered_within_a_bound_and_refused_beyond() -> None:
    policy = evolve(POLICY, remembered=2)
    world, consumer, producer = pair(policy=policy, auto=False)
    world.offer(consumer, "z", [producer])
    world.settle()
    wire = world.wire(consumer, producer)
    for number in range(10, 15):
        name = attempt_of(consumer, producer, number, f"t{number}")
        world.send(wire, producer, Revoke(name))
        world.cut(producer, consumer)
        world.settle()
    assert len(producer.endpoint.sending.producers.states) == 3
    forgotten = attempt_of(consumer, producer, 10, "t10")
    late = evolve(consumer_state(consumer).register, attempt=forgotten)
    world.request(producer, "t10")
    world.send(wire, producer, late)
    world.settle()
    assert sent(producer, Failed)[-1] == Failed(forgotten, (), Reason.UNKNOWN)
    assert producer_state(producer, "t10").registration is None
    assert not world.writes


def test_a_forgotten_attempt_over_a_weak_transport_is_unproven() -> None:
    world, consumer, producer = pair(WEAK, evolve(POLICY, remembered=1), auto=False)
    world.offer(consumer, "z", [producer])
    world.settle()
    wire = world.wire(consumer, producer)
    world.cut(producer, consumer)
    for number in range(10, 13):
        world.send(wire, producer, Revoke(attempt_of(consumer, producer, number, f"t{number}")))
    name = attempt_of(consumer, producer, 10, "t10")
    world.send(wire, producer, Query(name), Received(name))
    world.settle()
    assert sent(producer, Unproven) == [Unproven(name, ())]


# -- HELLO and links


def test_who_does_not_fit_is_refused_at_both_ends() -> None:
    world = World()
    consumer, producer = world.node("d", model="m"), world.node("p", model="n")
    world.offer(consumer, "a", [producer])
    world.settle()
    assert world.reason(consumer, "a") == "link_refused"
    assert world.released(consumer, "a")
    assert consumer.counted["hello_refused"] == 1
    assert producer.counted["refused_by_peer"] == 1
    world.advance(seconds(10))
    assert not world.wires
    assert not consumer.endpoint.links.store.states
    assert consumer.endpoint.next_deadline() == FOREVER


def test_the_producer_too_refuses_who_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    world, consumer, producer = pair()
    monkeypatch.setattr(consumer.endpoint.links, "_fits", lambda ours, theirs: None)
    monkeypatch.setattr(
        producer.endpoint.links,
        "_fits",
        lambda ours, theirs: evolve(world_refusal(), theirs=theirs.engine),
    )
    world.offer(consumer, "a", [producer])
    world.settle()
    world.advance(seconds(10))
    assert world.reason(consumer, "a") == "link_lost"
    assert world.released(consumer, "a"), "nothing was granted over a link that was refused"
    assert producer.counted["hello_refused"] >= 1
    assert consumer.counted["refused_by_peer"] >= 1
    assert not producer.endpoint.sending.producers.states


def test_memory_keys_follow_an_accepted_hello_and_go_one_way() -> None:
    world, consumer, producer = pair()
    for node in (consumer, producer):
        links = node.endpoint.links
        links._hello = evolve(links._hello, memory=b"keys of " + node.name.encode())
    address = ProducerAddress("p", 1)

    def said(effects: list[Any]) -> list[Any]:
        return [each.message for each in effects if isinstance(each, Transmit)]

    dialed = consumer.endpoint.handle(ConnectionOpened(7, 1, address), world.local(consumer))
    assert said(dialed) == [], "not a byte before the producer has shown who it is"
    (first,) = said(producer.endpoint.handle(ConnectionOpened(7, 2, None), world.local(producer)))
    assert first.memory == b"", "nobody writes into a producer over this link"
    wrong = evolve(first, model=(("name", "another"),))
    effects = consumer.endpoint.handle(MessageReceived(7, wrong), world.local(consumer))
    assert not [each for each in said(effects) if isinstance(each, Hello)]
    consumer.endpoint.handle(ConnectionOpened(8, 3, address), world.local(consumer))
    effects = consumer.endpoint.handle(MessageReceived(8, first), world.local(consumer))
    (second,) = [each for each in said(effects) if isinstance(each, Hello)]
    assert second.memory == b"keys of d"
    assert second.nonce == 3


def world_refusal() -> Any:
    from pushkv.core.messages import Refused

    return Refused("engine", "p", "")


@pytest.mark.parametrize("up_already", [False, True])
def test_another_engine_at_the_address_is_not_registered_with(up_already: bool) -> None:
    world, consumer, producer = pair()
    if up_already:
        world.prefill(producer, "z")
        world.offer(consumer, "z", [producer])
        world.settle()
    address = evolve(producer.address, engine="q")
    blocks = consumer.memory.take(2, Owner("attempt", "a", 7))
    event = offered(producer, producers=(address,), blocks=(blocks,))
    consumer.offers[A, 7] = Offer(event, Owner("attempt", "a", 7))
    world.happen(consumer, event)
    world.settle()
    assert world.reason(consumer, "a", 7) == "wrong_engine"
    assert [message.attempt.transfer for message in sent(consumer, Register)] == (
        ["z"] if up_already else []
    )


def test_names_expected_at_one_address_share_its_link() -> None:
    named = ProducerAddress("p", 1, 0, "p")
    assert named == ProducerAddress("p", 1, 0)
    assert hash(named) == hash(ProducerAddress("p", 1, 0))


def test_hello_of_a_newer_link_ends_the_older_one_first() -> None:
    world, consumer, producer = registered(computed=False)
    older = world.wire(consumer, producer)
    world.cut(consumer, producer)
    world.lose(older, consumer)
    world.heal()
    world.advance(seconds(0.3))
    newer = world.wire(consumer, producer)
    assert newer is not older
    assert older.number not in world.wires
    (ours,) = producer.endpoint.links.store.states.values()
    (theirs,) = consumer.endpoint.links.store.states.values()
    assert list(producer.permits) == [ours.epoch] == [theirs.epoch]
    assert world.reason(consumer, "a") == "link_lost"
    assert world.released(consumer, "a"), "asked for, and nothing was open"


def test_a_message_on_an_older_connection_is_void() -> None:
    world, consumer, producer = registered(computed=False)
    older = world.wire(consumer, producer)
    world.cut(consumer, producer)
    world.lose(older, consumer)
    world.heal()
    world.advance(seconds(0.3))
    name = attempt_of(consumer, producer, 5, "b")
    world.happen(producer, MessageReceived(older.number, Query(name)))
    assert producer.counted["void_message"] == 1
    assert (name.transfer, 0) not in producer.endpoint.sending.producers.states


def test_a_mute_peer_does_not_keep_the_address_to_itself() -> None:
    world, consumer, producer = pair()
    world.cut(producer, consumer)
    world.offer(consumer, "a", [producer])
    world._dialing.clear()
    mute = world.connect(consumer, producer, producer.address)
    world.settle()
    world.advance(POLICY.connect - 1)
    assert mute.open == {"d": True, "p": True}
    world.advance(1)
    assert mute.open == {"d": False, "p": False}
    assert world.reason(consumer, "a") == "unreachable"
    assert world.released(consumer, "a")
    mute.queues["d"].clear()
    world.heal()
    world.prefill(producer, "b")
    world.offer(consumer, "b", [producer])
    world.advance(seconds(3))
    assert world.delivered(consumer, "b", 1)


@pytest.mark.parametrize(
    "changes",
    [{"stamp": 1}, {"consumer_incarnation": 5}, {"producer_incarnation": 5}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_grant_for_another_stamp_or_life_is_void(changes: dict[str, Any]) -> None:
    world, consumer, producer = registered()
    wire = world.wire(consumer, producer)
    world.cut(consumer, producer)
    world.advance(seconds(1.1))
    permits = dict(producer.permits)
    (grant,) = [each for each in wire.queues["p"] if isinstance(each, Grant)]
    world.happen(producer, MessageReceived(wire.number, evolve(grant, **changes)))
    assert producer.permits == permits
    assert producer.counted["stale_grant"] == 1
    world.happen(producer, MessageReceived(wire.number, grant))
    assert producer.permits != permits
    world.happen(producer, MessageReceived(wire.number, grant))
    assert producer.counted["stale_grant"] == 2, "a stamp is taken once"


def test_a_ping_at_the_producer_is_counted() -> None:
    world, consumer, producer = registered()
    world.happen(producer, MessageReceived(world.wire(consumer, producer).number, Ping(1)))
    assert producer.counted["ping_at_producer"] == 1


def test_a_dead_producer_is_dialled_only_while_it_is_wanted() -> None:
    world, consumer, producer = pair()
    world.crash(producer)
    world.offer(consumer, "a", [producer])
    world.advance(seconds(3))
    assert world.reason(consumer, "a") == "unreachable"
    assert world.released(consumer, "a"), "nothing was ever offered to anybody"
    assert consumer.endpoint.next_deadline() == FOREVER


def test_an_address_wanted_again_while_it_is_dialled_is_dialled_again() -> None:
    world, consumer, producer = pair()
    world.part(consumer, producer)
    world.offer(consumer, "a", [producer])
    world.happen(consumer, Cancelled(A))
    assert world.released(consumer, "a")
    world.offer(consumer, "b", [producer])
    (dial,) = world._dialing
    dial.until = world.now
    world.prefill(producer, "b")
    world.settle()
    assert not world._dialing, "it was refused"
    world.heal()
    world.advance(seconds(1))
    assert world.delivered(consumer, "b", 1)


# -- several ranks (R12)


def ranked(consumers: int, producers: int) -> tuple[World, list[Node], list[Node]]:
    world = World(auto=False)
    return (
        world,
        [world.node(f"d{rank}", engine="d", rank=rank) for rank in range(consumers)],
        [world.node(f"p{rank}", engine="p", rank=rank) for rank in range(producers)],
    )


def test_a_rank_that_fails_makes_its_siblings_revoke() -> None:
    world, (consumer,), producers = ranked(1, 2)
    for producer in producers:
        world.request(producer, "a")
    world.offer(consumer, "a", producers)
    world.settle()
    world.happen(producers[0], PrefillAborted(A))
    world.settle()
    assert world.reason(consumer, "a") == "aborted"
    assert len(sent(consumer, Revoke)) == 1
    assert world.released(consumer, "a")


def test_a_rank_that_fails_at_once_has_siblings_to_withdraw() -> None:
    world, (consumer,), producers = ranked(1, 2)
    world.prefill(producers[0], "z")
    world.offer(consumer, "z", producers[:1])
    world.settle()
    first = evolve(producers[0].address, engine="somebody else")
    blocks = consumer.memory.take(2, Owner("attempt", "a", 7))
    event = offered(producers[0], producers=(first, producers[1].address), blocks=(blocks,))
    consumer.offers[A, 7] = Offer(event, Owner("attempt", "a", 7))
    world.happen(consumer, event)
    assert world.reason(consumer, "a", 7) == "wrong_engine"
    assert world.released(consumer, "a", 7)
    world.settle()
    assert not [m for m in sent(consumer, Register) if m.attempt.transfer == "a"]


def test_the_source_is_free_when_all_expected_ranks_have_ended() -> None:
    world, consumers, (producer,) = ranked(2, 1)
    world.auto = True
    world.prefill(producer, "a")
    for consumer in consumers:
        world.offer(consumer, "a", [producer], consumer_ranks=(0, 1))
        assert not producer.released_sources
        world.settle()
    assert all(world.delivered(consumer, "a") for consumer in consumers)
    assert [report.reason for report in producer.released_sources] == [None]


@pytest.mark.parametrize("registered_first", [False, True])
def test_a_rank_that_never_registers_is_bound_by_the_hold_time(registered_first: bool) -> None:
    world, consumers, (producer,) = ranked(2, 1)
    world.auto = True
    if registered_first:
        world.offer(consumers[0], "a", [producer], consumer_ranks=(0, 1))
        world.settle()
    world.prefill(producer, "a")
    computed_at = world.now
    if not registered_first:
        world.advance(seconds(5))
        world.offer(consumers[0], "a", [producer], consumer_ranks=(0, 1))
    world.settle()
    assert world.delivered(consumers[0], "a")
    assert not producer.released_sources
    world.advance(computed_at + POLICY.hold - world.now - 1)
    assert not producer.released_sources
    world.advance(1)
    assert [report.reason for report in producer.released_sources] == ["expired"]
    world.offer(consumers[1], "a", [producer], consumer_ranks=(0, 1))
    world.settle()
    assert world.reason(consumers[1], "a") == "expired"


def test_a_rank_that_was_only_guessed_is_served_nothing_later() -> None:
    world, consumers, (producer,) = ranked(2, 1)
    world.auto = True
    world.prefill(producer, "a")
    world.offer(consumers[1], "a", [producer], consumer_ranks=(1,))
    world.settle()
    assert world.delivered(consumers[1], "a")
    assert [report.reason for report in producer.released_sources] == [None]
    world.offer(consumers[0], "a", [producer], consumer_ranks=(0,))
    world.settle()
    assert world.reason(consumers[0], "a") == "aborted"


def test_a_stranger_with_another_prompt_takes_nothing_from_the_others() -> None:
    world, consumers, (producer,) = ranked(3, 1)
    world.auto = True
    world.prefill(producer, "a")
    world.auto = False
    world.offer(consumers[0], "a", [producer], consumer_ranks=(0, 1))
    world.settle()
    world.offer(consumers[2], "a", [producer], digest=b"other", consumer_ranks=(2,))
    world.settle()
    assert world.reason(consumers[2], "a") == "prompt_mismatch"
    world.auto = True
    world.offer(consumers[1], "a", [producer], consumer_ranks=(0, 1))
    world.settle()
    assert world.delivered(consumers[0], "a")
    assert world.delivered(consumers[1], "a")
    assert len(producer.released_sources) == 1


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_rank_that_is_forgotten_while_others_need_the_source_is_a_new_one(
    comes_back: bool,
) -> None:
    world = World(policy=evolve(POLICY, remembered=1))
    consumers = [world.node(f"d{rank}", engine="d", rank=rank) for rank in range(2)]
    producer = world.node("p")
    for name, ranks in (("a", (0, 1)), ("b", (1,)), ("c", (1,))):
        world.prefill(producer, name)
        world.offer(consumers[1], name, [producer], consumer_ranks=ranks)
        world.settle()
        assert world.delivered(consumers[1], name, world_attempt(consumers[1]))
    assert ("a", 1) not in producer.endpoint.sending.producers.states
    if comes_back:
        world.auto = False
        world.offer(consumers[1], "a", [producer], consumer_ranks=(0, 1))
        world.settle()
        world.auto = True
        world.offer(consumers[0], "a", [producer], consumer_ranks=(0, 1))
        assert A in producer.sources, "it is read for the rank that came back"
        world.settle()
        assert world.delivered(consumers[1], "a", world_attempt(consumers[1]))
    else:
        world.happen(producer, PrefillAborted(A))
    world.settle()
    assert [each.transfer for each in producer.released_sources].count(A) == 1


def test_a_rank_that_its_sibling_makes_forgotten_hears_no_more() -> None:
    """The word that ends one rank goes to all; the bound may take another one meanwhile."""
    world = World(policy=evolve(POLICY, remembered=1))
    consumers = [world.node(f"d{rank}", engine="d", rank=rank) for rank in range(2)]
    producer = world.node("p")
    world.prefill(producer, "a")
    world.offer(consumers[1], "a", [producer], consumer_ranks=(0, 1))
    world.settle()
    assert world.delivered(consumers[1], "a")
    world.happen(producer, PrefillAborted(A))
    world.settle()
    assert set(producer.endpoint.sending.producers.states) == {("a", 0)}
    assert [each.transfer for each in producer.released_sources] == [A]


def world_attempt(node: Node) -> int:
    return max(number for _, number in node.offers)


# -- one deadline for all


def test_a_tick_with_nothing_due_changes_nothing() -> None:
    world, consumer, producer = registered()
    world.watch = True
    for node in (consumer, producer):
        due = node.endpoint.next_deadline()
        assert node.endpoint.handle(Tick(), world.local(node)) == []
        assert node.endpoint.next_deadline() == due
    assert world.records == []


def test_after_a_tick_nothing_is_overdue() -> None:
    world, consumer, producer = registered()
    for _ in range(60):
        world.now += seconds(0.37)
        for node in (consumer, producer):
            for _ in range(3):
                world.happen(node, Tick())
            assert node.endpoint.next_deadline() > world.local(node)
        if _ % 2:
            world.settle()


def test_idle_means_idle() -> None:
    world, consumer, producer = pair()
    world.prefill(producer, "a")
    world.offer(consumer, "a", [producer])
    world.settle()
    world.reset(world.wire(consumer, producer))
    world.advance(seconds(60))
    for node in (consumer, producer):
        assert node.endpoint.next_deadline() == FOREVER


def test_one_request_per_transfer_at_a_time() -> None:
    world, consumer, producer = registered(computed=False)
    world.happen(producer, Arrived(A, b"other"))
    assert producer.counted["duplicate_request"] == 1
    world.compute(producer, "a")
    world.finish(world.ordered()[0])
    world.settle()
    assert world.delivered(consumer, "a")


def test_the_observer_sees_every_step() -> None:
    world, consumer, producer = pair()
    world.watch = True
    world.prefill(producer, "a")
    world.offer(consumer, "a", [producer])
    world.settle()
    rows = {record.row.name for record in world.records}
    assert {
        "producer.queued/Computed",
        "producer.holding/RegistrationReceived",
        "producer.writing/WriteDone",
        "consumer.registering/LinkUp",
        "consumer.registered/Complete",
        "request.releasing/MemberFreed",
        "link.up/Grant",
    } <= rows


def test_effects_come_in_order() -> None:
    world, consumer, producer = registered()
    world.cut(producer, consumer)
    world.finish(world.ordered()[0])
    wire = world.wire(consumer, producer)
    (complete,) = [each for each in wire.queues["d"] if isinstance(each, Complete)]
    effects = consumer.endpoint.handle(
        MessageReceived(wire.number, complete), world.local(consumer)
    )
    names = [type(effect).__name__ for effect in effects[:2]]
    assert names == ["Delivered", "BlocksReleased"]
    received = Transmit(wire.number, Received(complete.attempt))
    assert received in effects[2:]

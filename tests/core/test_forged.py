"""A peer acts only on transfers it is party to: every kind of message, forged, replayed, too early.

The forger is a peer like any other, greeted over a link of its own, that knows every name there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from pushkv.core.ids import AttemptId, Part, seconds
from pushkv.core.messages import (
    Complete,
    Failed,
    Grant,
    Message,
    Ping,
    Progress,
    Query,
    Reason,
    Received,
    Refused,
    Registered,
    Revoke,
    Revoked,
    Unproven,
)
from pushkv.testing.world import Node, World

from .stage import attempt_of, consumer_state, finish, producer_state, worker

WHOLE = (Part(0, 0, 8),)
TO_PRODUCER = ("register", "query", "revoke", "received")
TO_CONSUMER: dict[str, Callable[[AttemptId], Message]] = {
    "registered": Registered,
    "progress": lambda name: Progress(name, 8),
    "complete": lambda name: Complete(name, WHOLE),
    "complete nothing": lambda name: Complete(name, ()),
    "failed": lambda name: Failed(name, (), Reason.ABORTED),
    "revoked": lambda name: Revoked(name, ()),
    "unproven": lambda name: Unproven(name, WHOLE),
}


def with_forger(*, consumes: bool) -> tuple[World, Node, Node, Node]:
    """A registered attempt of "a" that writes, and a third engine linked to one of its ends."""
    world = World(auto=False)
    consumer, producer, forger = world.node("d"), world.node("p"), world.node("x")
    world.request(producer, "a")
    world.compute(producer, "a")
    world.offer(consumer, "a", [producer])
    world.settle()
    if consumes:
        world.offer(forger, "z", [producer])
    else:
        world.offer(consumer, "z", [forger])
    world.settle()
    return world, consumer, producer, forger


def delivers(world: World, consumer: Node) -> bool:
    finish(world)
    world.settle()
    return world.delivered(consumer, "a")


@pytest.mark.parametrize("kind", TO_PRODUCER)
def test_what_a_consumer_says_under_another_ones_name_is_refused(kind: str) -> None:
    world, consumer, producer, forger = with_forger(consumes=True)
    before = producer_state(producer)
    name = attempt_of(consumer, producer)
    said: dict[str, Message] = {
        "register": evolve(consumer_state(consumer).register, blocks=((7, 6, 5, 4),)),
        "query": Query(name),
        "revoke": Revoke(name),
        "received": Received(name),
    }
    heard = len(forger.endpoint.receiving.consumers.states)
    world.send(world.wire(forger, producer), producer, said[kind])
    world.settle()
    assert producer.counted["fenced"] == 1
    assert producer_state(producer) is before
    assert len(forger.endpoint.receiving.consumers.states) == heard
    assert delivers(world, consumer)


@pytest.mark.parametrize("kind", TO_PRODUCER)
@pytest.mark.parametrize(
    "wrong", [{"consumer_incarnation": 5}, {"consumer_rank": 3}, {"producer_rank": 3}]
)
def test_what_names_another_life_or_rank_of_the_sender_is_refused(
    kind: str, wrong: dict[str, Any]
) -> None:
    world, consumer, producer, _ = with_forger(consumes=True)
    before = producer_state(producer)
    name = evolve(attempt_of(consumer, producer), **wrong)
    said: dict[str, Message] = {
        "register": evolve(consumer_state(consumer).register, attempt=name),
        "query": Query(name),
        "revoke": Revoke(name),
        "received": Received(name),
    }
    world.send(world.wire(consumer, producer), producer, said[kind])
    world.settle()
    assert producer.counted["fenced"] == 1
    assert producer_state(producer) is before
    assert delivers(world, consumer)


@pytest.mark.parametrize("kind", TO_CONSUMER)
def test_what_a_producer_says_of_another_ones_attempt_is_refused(kind: str) -> None:
    world, consumer, producer, forger = with_forger(consumes=False)
    key = attempt_of(consumer, producer)
    before = consumer.endpoint.receiving.consumers.states[key]
    world.send(world.wire(consumer, forger), consumer, TO_CONSUMER[kind](key))
    world.settle()
    assert consumer.counted["fenced"] == 1
    assert consumer.endpoint.receiving.consumers.states[key] is before
    assert world.outcome(consumer, "a", 0) is None
    assert delivers(world, consumer)


@pytest.mark.parametrize("kind", TO_CONSUMER)
def test_what_came_before_any_registration_was_sent_is_refused(kind: str) -> None:
    """The producer that an attempt is for may say nothing of it before it was asked."""
    world, consumer, _, forger = with_forger(consumes=False)
    late = world.node("q")
    world.part(consumer, late)
    world.offer(consumer, "b", [late])
    world.settle()
    states = consumer.endpoint.receiving.consumers.states.values()
    (state,) = (each for each in states if each.attempt.transfer == "b")
    assert state.producer is None
    world.send(world.wire(consumer, forger), consumer, TO_CONSUMER[kind](state.attempt))
    world.settle()
    assert consumer.counted["fenced"] == 1
    assert consumer.endpoint.receiving.consumers.states[state.attempt] is state


def test_a_grant_over_one_link_permits_nothing_over_another() -> None:
    world, consumer, producer, forger = with_forger(consumes=True)
    theirs = producer.endpoint.links.store.states[worker(consumer)]
    permits = dict(producer.permits)
    lives = worker(consumer).incarnation, worker(producer).incarnation
    for stamp in (*theirs.stamps, 0, 2**63):
        grant = Grant(stamp, seconds(1_000), *lives)
        world.send(world.wire(forger, producer), producer, grant)
        world.settle()
    assert producer.endpoint.links.store.states[worker(consumer)] == theirs
    assert producer.permits == permits
    assert producer.counted["stale_grant"] == len(theirs.stamps) + 2


@pytest.mark.parametrize("message", [Ping(5), Refused("model", "a", "b")])
def test_what_a_forger_says_of_its_own_link_ends_no_other(message: Message) -> None:
    world, consumer, producer, forger = with_forger(consumes=True)
    theirs = producer.endpoint.links.up(worker(consumer))
    world.send(world.wire(forger, producer), producer, message)
    world.settle()
    assert producer.endpoint.links.up(worker(consumer)) == theirs
    assert delivers(world, consumer)


@pytest.mark.parametrize("linked", ["the forger", "the next life"])
def test_a_registration_that_was_overheard_is_good_for_nobody_else(linked: str) -> None:
    world, consumer, producer, forger = with_forger(consumes=True)
    register = consumer_state(consumer).register
    assert delivers(world, consumer)
    speaker = forger
    if linked == "the next life":
        world.crash(consumer)
        world.restart(consumer)
        world.advance(seconds(4))
        world.offer(consumer, "b", [producer])
        world.settle()
        speaker = consumer
    world.request(producer, "a")
    world.compute(producer, "a")
    before = producer.counted["fenced"]
    for _ in range(3):
        world.send(world.wire(speaker, producer), producer, register)
        world.settle()
    assert producer.counted["fenced"] == before + 3
    assert not [each for each in world.ordered() if each.effect.attempt.transfer == "a"]


@pytest.mark.parametrize("phase", ["before", "queued", "computed", "registered"])
@pytest.mark.parametrize("same_rank", [True, False])
def test_who_guesses_a_transfer_but_not_its_prompt_gets_nothing_and_costs_nothing(
    phase: str, same_rank: bool
) -> None:
    world = World(auto=False)
    producer, victim = world.node("p"), world.node("d")
    guesser = world.node("x", rank=0 if same_rank else 1)

    def guess() -> None:
        ranks = (guesser.rank,)
        world.offer(guesser, "a", [producer], digest=b"a guess", consumer_ranks=ranks)
        world.settle()

    if phase == "before":
        guess()
    world.request(producer, "a")
    world.settle()
    if phase == "queued":
        guess()
    world.compute(producer, "a")
    world.settle()
    if phase == "computed":
        guess()
    world.offer(victim, "a", [producer])
    world.settle()
    if phase == "registered":
        guess()
    assert not [each for each in world.ordered() if each.effect.attempt.consumer == "x"]
    finish(world)
    world.settle()
    assert world.delivered(victim, "a")
    assert not any(world.delivered(guesser, "a", number) for number in range(guesser.attempts))
    assert not world.ordered()

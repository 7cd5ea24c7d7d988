"""What the tests of endpoints have in common: a registered attempt, and ways to look at it."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from pushkv.core.events import (
    Offered,
)
from pushkv.core.ids import (
    AttemptId,
    EngineId,
    Incarnation,
    TransferId,
    Worker,
)
from pushkv.core.link import LinkStatus
from pushkv.core.policy import Policy
from pushkv.testing.world import (
    POLICY,
    STRONG,
    Node,
    World,
    Write,
    pair,
)

A = TransferId("a")


def registered(
    capabilities: Any = STRONG, policy: Policy = POLICY, *, computed: bool = True
) -> tuple[World, Node, Node]:
    """An attempt of "a" is registered; what the transport does is up to the test."""
    world, consumer, producer = pair(capabilities, policy, auto=False)
    world.request(producer, "a")
    if computed:
        world.compute(producer, "a")
    world.offer(consumer, "a", [producer])
    world.settle()
    return world, consumer, producer


def flying(world: World) -> Write:
    (write,) = world.ordered()
    assert world.post(write)
    return write


def worker(node: Node) -> Worker:
    return Worker(EngineId(node.engine), Incarnation(node.incarnation), node.rank)


def attempt_of(consumer: Node, producer: Node, number: int = 0, transfer: str = "a") -> AttemptId:
    return AttemptId(
        EngineId(consumer.engine),
        Incarnation(consumer.incarnation),
        consumer.rank,
        producer.rank,
        TransferId(transfer),
        number,
    )


def sent(node: Node, kind: type) -> list[Any]:
    return [message for message in node.sent if isinstance(message, kind)]


def consumer_state(node: Node) -> Any:
    (state,) = node.endpoint.receiving.consumers.states.values()
    return state


def producer_state(node: Node, transfer: str = "a", rank: int = 0) -> Any:
    return node.endpoint.sending.producers.states[TransferId(transfer), rank]


def offered(producer: Node, **changes: Any) -> Offered:
    event = Offered(A, 7, (producer.address,), ((0, 1),), 0, 8, b"a")
    return evolve(event, **changes)


def link_status(node: Node) -> LinkStatus:
    (link,) = node.endpoint.links.store.states.values()
    return link.status


def finish(world: World) -> None:
    for write in world.ordered():
        world.finish(write)


def fail(world: World) -> None:
    for write in world.ordered():
        world.close(write, "failed")

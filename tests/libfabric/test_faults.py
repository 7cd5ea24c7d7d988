"""Peers that die, stop, come back or are many, over LIBFABRIC, where NIXL itself then hangs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from tests.nixl.nixl_end import RemoteEnd, meet

from pushkv.core.errors import TransportError
from pushkv.core.ids import EngineId, Incarnation, Worker
from pushkv.transport import Arrival, Completion, WriteOutcome
from pushkv_nixl import NixlTransport

pytestmark = pytest.mark.timeout(110)

BLOCK = 4096


def end(engine: str, incarnation: int, size_bytes: int = 1 << 23, **options: Any) -> RemoteEnd:
    options |= {"backend": "LIBFABRIC", "fabric": "tcp", "call_timeout_s": 1.0}
    return RemoteEnd(engine, incarnation, size_bytes=size_bytes, **options)


def outcome(producer: RemoteEnd, consumer: RemoteEnd, attempt: int) -> WriteOutcome:
    producer.call("write", consumer.worker, attempt, [0], [consumer.base], BLOCK)
    (event,) = producer.call("events", 1, 20.0)
    assert isinstance(event, Completion)
    assert event.attempt.attempt == attempt
    return event.outcome


def arrived(consumer: RemoteEnd, attempt: int) -> None:
    """The next arrival is that of `attempt`, and all its bytes are there."""
    (event,) = consumer.call("events", 1)
    assert isinstance(event, Arrival)
    assert event.attempt.attempt == attempt
    assert consumer.call("zeros", [0], BLOCK) == 0


def kill(victim: RemoteEnd) -> None:
    victim.process.kill()
    victim.process.join()


def trio() -> tuple[RemoteEnd, RemoteEnd, RemoteEnd]:
    """A producer with bytes, a victim and a bystander, who all know each other."""
    producer, victim, other = end("P", 1), end("D", 2), end("E", 3)
    meet(producer.ready(), victim.ready(), other.ready())
    producer.call("fill", 1)
    for each in (victim, other):
        each.call("look", True)
    return producer, victim, other


def leave(*ends: RemoteEnd) -> None:
    """Ends end by themselves, also those in which NIXL hangs."""
    for each in ends:
        each.stop()
        assert each.process.exitcode == 0, each.worker


@pytest.mark.parametrize("written_before", [True, False])
def test_a_write_to_the_dead_hangs_in_nixl_and_costs_nobody_else(written_before: bool) -> None:
    producer, victim, other = trio()
    if written_before:
        assert outcome(producer, victim, 1) is WriteOutcome.DONE
    assert outcome(producer, other, 2) is WriteOutcome.DONE
    arrived(other, 2)
    kill(victim)
    producer.call("write", victim.worker, 3, [0], [victim.base], BLOCK)
    for attempt in range(4, 8):
        producer.call("write", other.worker, attempt, [0], [other.base], BLOCK)
    found = {each.attempt.attempt: each for each in producer.call("events", 5, 20.0)}
    assert found[3].outcome in (WriteOutcome.UNKNOWN, WriteOutcome.FAILED)
    assert {found[attempt].outcome for attempt in range(4, 8)} == {WriteOutcome.DONE}
    assert {each.attempt.attempt for each in other.call("events", 4)} == set(range(4, 8))

    assert producer.call("agents")[1] == 1, "NIXL does not hang any more: say so in the docs"
    successor = end("D", 20).ready()
    meet(producer, successor)
    successor.call("look", True)
    assert outcome(producer, successor, 8) is WriteOutcome.DONE
    arrived(successor, 8)
    other.call("fill", 2)
    other.call("write", producer.worker, 9, [0], [producer.base], BLOCK)
    producer.call("look", True)
    arrived(producer, 9)
    assert producer.call("close", 1.0) is False, "the agent that hangs still has the memory"
    leave(producer, other, successor)


def test_a_peer_that_is_loaded_when_it_is_dead_costs_nobody_else() -> None:
    producer, victim, other = end("P", 1).ready(), end("D", 2).ready(), end("E", 3).ready()
    producer.call("fill", 1)
    kill(victim)
    producer.call("add_peer", victim.worker, victim.memory)
    producer.call("add_peer", other.worker, other.memory)
    assert outcome(producer, other, 1) is WriteOutcome.DONE
    assert outcome(producer, victim, 2) is not WriteOutcome.DONE
    assert outcome(producer, other, 3) is WriteOutcome.DONE
    leave(producer, other)


def test_a_peer_that_stands_still_is_written_to_when_it_goes_on() -> None:
    producer, victim, other = trio()
    assert outcome(producer, victim, 1) is WriteOutcome.DONE
    arrived(victim, 1)
    os.kill(victim.process.pid or 0, signal.SIGSTOP)
    try:
        blocks = list(range(0, 1 << 23, BLOCK))
        addresses = [victim.base + at for at in blocks]
        producer.call("write", victim.worker, 2, blocks, addresses, BLOCK)
        producer.call("events", 1, 0.5)
        assert outcome(producer, other, 3) is WriteOutcome.DONE
        time.sleep(2.0)
    finally:
        os.kill(victim.process.pid or 0, signal.SIGCONT)
    producer.call("events", 1, 5.0)
    producer.call("add_peer", victim.worker, victim.memory)
    assert outcome(producer, victim, 4) is WriteOutcome.DONE
    leave(producer, victim, other)


@pytest.mark.parametrize("turn", range(3))
def test_a_peer_killed_amid_a_write_is_told_and_its_successor_served(turn: int) -> None:
    size = 128 << 20
    producer, victim = end("P", 1, size), end("D", 2, size)
    meet(producer.ready(), victim.ready())
    producer.call("fill", 3)
    victim.call("die_when_written", turn * BLOCK)
    producer.call("write", victim.worker, 1, [0], [victim.base], size)
    (event,) = producer.call("events", 1, 20.0)
    assert event.outcome in (WriteOutcome.UNKNOWN, WriteOutcome.DONE)
    assert outcome(producer, victim, 2) is not WriteOutcome.DONE
    successor = end("D", 4).ready()
    meet(producer, successor)
    successor.call("look", True)
    assert outcome(producer, successor, 3) is WriteOutcome.DONE
    arrived(successor, 3)
    leave(producer, successor)


def test_writers_killed_amid_writes_leave_a_consumer_that_serves_others() -> None:
    size = 64 << 20
    consumer = end("D", 1, size).ready()
    consumer.call("look", True)
    for life in range(4):
        writer = end("P", 10 + life, size).ready()
        meet(writer, consumer)
        writer.call("fill", life)
        consumer.call("clear")
        writer.call("write", consumer.worker, life, [0], [consumer.base], size)
        until = time.monotonic() + 10
        while consumer.call("zeros", [0], BLOCK) and time.monotonic() < until:
            time.sleep(0.0005)
        kill(writer)
        whole = consumer.call("events", 1, 0.3)
        assert not whole or consumer.call("zeros", range(0, size, BLOCK), BLOCK) == 0
    last = end("P", 50).ready()
    meet(last, consumer)
    last.call("fill", 9)
    assert outcome(last, consumer, 99) is WriteOutcome.DONE
    arrived(consumer, 99)
    leave(last, consumer)


def test_tcp_is_no_silent_fall_back() -> None:
    transport = NixlTransport(backend="LIBFABRIC")
    with pytest.raises(TransportError, match="provider tcp, but efa or cxi was asked for"):
        transport.start(
            Worker(EngineId("P"), Incarnation(1), 0), [], time.monotonic_ns, lambda: None
        )
    assert transport.close(5.0)


def test_agents_are_replaced_long_before_nixl_has_no_room_for_peers() -> None:
    producer = end("P", 1, connections_most=3).ready()
    producer.call("fill", 1)
    for life in range(10):
        consumer = end("D", 10 + life).ready()
        consumer.call("look", True)
        producer.call("add_peer", consumer.worker, consumer.memory)
        assert outcome(producer, consumer, life) is WriteOutcome.DONE
        arrived(consumer, life)
        producer.call("remove_peer", consumer.worker)
        leave(consumer)
    made, hung = producer.call("agents")
    assert (made, hung) == (4, 0)
    leave(producer)


def test_removed_and_added_again_two_hundred_times_leaves_descriptors_flat() -> None:
    producer, consumer, _ = ends = trio()
    seen = []
    for attempt in range(200):
        assert outcome(producer, consumer, attempt) is WriteOutcome.DONE
        producer.call("remove_peer", consumer.worker)
        producer.call("add_peer", consumer.worker, consumer.memory)
        seen.append((producer.call("descriptors"), consumer.call("descriptors")))
    for each in zip(*seen, strict=True):
        assert max(each) - min(each) <= 4, each
    leave(*ends)


def test_new_peers_write_to_another_agent_before_one_has_no_room_for_writers() -> None:
    consumer = end("D", 1, connections_most=3).ready()
    consumer.call("look", True)
    first = consumer.memory
    told = [first]
    old = end("P", 2).ready()
    old.call("fill", 1)
    old.call("add_peer", consumer.worker, first)
    for life in range(8):
        told.append(consumer.call("info")[2])
        writer = end("P", 10 + life).ready()
        writer.call("fill", life)
        consumer.call("clear")
        writer.call("add_peer", consumer.worker, told[-1])
        assert outcome(writer, consumer, life) is WriteOutcome.DONE
        arrived(consumer, life)
        leave(writer)
    assert len(set(told)) == 2
    assert outcome(old, consumer, 100) is WriteOutcome.DONE, "what was told first is still good"
    arrived(consumer, 100)
    old.call("add_peer", consumer.worker, told[-1])
    assert outcome(old, consumer, 101) is WriteOutcome.DONE, "as is what was told since"
    arrived(consumer, 101)
    assert consumer.call("close", 5.0)
    leave(old, consumer)

"""A drained engine takes nothing new at either role, and what is under way ends as ever."""

from __future__ import annotations

import pytest
from tests.runtime.node import QUICK, Node, right, until

from pushkv.core.effects import Report, SourceReleased, SourceYielded
from pushkv.core.events import (
    Arrived,
    Computed,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
)
from pushkv.core.ids import TransferId, seconds
from pushkv.core.messages import Reason
from pushkv.model.faults import Fault, FaultRule
from pushkv_memory import MemoryFabric

PROMPT = tuple(range(100))
SLOW = {"expected": seconds(60), "waiting": seconds(60), "hold": seconds(60)}
"""Whatever ends before the test's time is over was not ended by a clock of the protocol."""


def test_a_drained_consumer_computes_here_and_has_its_blocks_back() -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        free = consumer.free
        consumer.runtime.drain()
        producer.produce("t", PROMPT).result(10)
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert generation.tokens == right(PROMPT)
        assert (generation.prefilled, generation.reason) == (True, Reason.CLOSED)
        assert consumer.runtime.counters["not_delivered_endpoint_closed"] == 1
        assert consumer.runtime.left == 0
        until(lambda: consumer.free == free)


def test_undrained_it_receives_again() -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        for end in (producer, consumer):
            end.runtime.drain()
            end.runtime.drain(on=False)
        producer.produce("t", PROMPT).result(10)
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert (generation.prefilled, generation.reason) == (False, None)
        assert generation.tokens == right(PROMPT)


def _registered(node: Node) -> bool:
    loop = node.runtime._loop
    return loop is not None and bool(loop.endpoint.sending.producers.states)


@pytest.mark.parametrize("registers_first", [False, True])
def test_a_drained_producer_says_so_at_once(registers_first: bool) -> None:
    """No matter whether the registration or the drain was first: the request had not come."""
    fabric = MemoryFabric()
    with Node(fabric, "P", changes=SLOW) as producer, Node(fabric, "D", changes=SLOW) as consumer:
        before = producer.free
        if not registers_first:
            producer.runtime.drain()
        generation = consumer.consume("t", PROMPT, producer.address)
        if registers_first:
            until(lambda: _registered(producer))
            producer.runtime.drain()
        assert generation.result(10).reason is Reason.CLOSED
        producer.produce("t", PROMPT).result(10)
        until(lambda: producer.free == before)
        assert producer.runtime.counters["not_served_endpoint_closed"] == 1
        assert producer.runtime.left == 0


def test_what_has_arrived_is_served_by_a_drained_producer() -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        producer.produce("t", PROMPT).result(10)
        until(lambda: producer.runtime.left == 1)
        producer.runtime.drain()
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert (generation.prefilled, generation.reason) == (False, None)
        until(lambda: producer.runtime.left == 0)


def test_a_retry_belongs_to_what_is_under_way() -> None:
    """The drain comes before the first attempt's WRITEs fail; the second one is made and served."""
    faults = FaultRule(Fault.WRITE_FAILURE, 1_000_000, budget=QUICK.write_retries + 1)
    fabric = MemoryFabric(faults=[faults])
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        generation = consumer.consume("t", PROMPT, producer.address)
        until(lambda: consumer.runtime.left)
        consumer.runtime.drain()
        producer.produce("t", PROMPT).result(10)
        assert generation.result(10).prefilled is False
        assert consumer.runtime.counters["not_delivered_write_failed"] == 1
        until(lambda: consumer.runtime.left == 0)


def test_an_engine_hears_of_each_preemption_and_once_of_the_end() -> None:
    """Of a prefill that nobody is served, also after the drain is over."""
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer:
        producer.engine.stop()
        bridge, name = producer.runtime.bridge, TransferId("t")
        producer.runtime.drain()
        bridge.submit(Arrived(name, b"d"))
        bridge.submit(Computed(name, 16, ((1,),), final=False))
        bridge.submit(PrefillPreempted(name))
        bridge.submit(PrefillResumed(name))
        until(lambda: bridge.wait(0))
        heard: list[Report] = bridge.take()
        producer.runtime.drain(on=False)
        bridge.submit(Computed(name, 20, ((2, 3),), final=True))
        bridge.submit(PrefillAborted(name))
        until(lambda: producer.runtime.counters["unknown_transfer"])
        heard += bridge.take()
        assert heard == [SourceYielded(name), SourceReleased(name, Reason.CLOSED)]


def test_a_request_that_came_before_is_not_a_new_one_when_it_comes_again() -> None:
    with Node(MemoryFabric(), "P") as producer:
        producer.engine.stop()
        bridge, name = producer.runtime.bridge, TransferId("t")
        bridge.submit(Arrived(name, b"d"))
        until(lambda: producer.runtime.left == 1)
        producer.runtime.drain()
        bridge.submit(Arrived(name, b"d"))
        bridge.submit(Computed(name, 20, ((2, 3),), final=True))
        until(lambda: bridge.wait(0))
        assert bridge.take() == [SourceReleased(name, Reason.EXPIRED)]


def test_a_prefill_that_came_while_drained_is_refused_also_after() -> None:
    """Until it is over: nobody waits for it in vain."""
    fabric = MemoryFabric()
    with Node(fabric, "P", changes=SLOW) as producer, Node(fabric, "D", changes=SLOW) as consumer:
        producer.engine.stop()
        producer.runtime.drain()
        producer.runtime.bridge.submit(Arrived(TransferId("t"), b"d"))
        producer.runtime.bridge.submit(Computed(TransferId("u"), 20, ((2, 3),), final=True))
        until(lambda: producer.runtime.counters["unknown_transfer"])
        producer.runtime.drain(on=False)
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert generation.reason is Reason.CLOSED


def test_it_says_once_when_it_is_empty(caplog: pytest.LogCaptureFixture) -> None:
    def said() -> int:
        return caplog.text.count("P is drained and empty")

    caplog.set_level("INFO", "pushkv.runtime")
    with Node(MemoryFabric(), "P") as producer:
        producer.produce("t", PROMPT).result(10)
        until(lambda: producer.runtime.left == 1)
        producer.runtime.drain()
        until(lambda: "P is drained: nothing new" in caplog.text)
        assert said() == 0
        until(said)  # nobody came for it within its hold time
        producer.runtime.drain()
        producer.produce("u", PROMPT).result(10)
        until(lambda: producer.runtime.counters["not_served_endpoint_closed"] == 1)
        assert said() == 1

"""Two processes over real NIXL: kill -9 on either side, and a successor on the same port."""

from __future__ import annotations

import statistics
import time

import pytest
from tests.runtime.nixl_node import BLOCKS, NixlNode
from tests.runtime.node import until

from pushkv.core.ids import seconds
from pushkv.core.messages import Reason
from pushkv.testing.reference_engine import ReferenceCache, Role, generate

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]

PROMPT = tuple(range(100))
PATIENT = {"expected": seconds(20), "hold": seconds(20), "waiting": seconds(20)}


def right(prompt: tuple[int, ...], layers: int = 2) -> tuple[int, ...]:
    return generate(ReferenceCache(layers=layers, block_count=BLOCKS), prompt, 4)


def transfer(name: str, producer: NixlNode, consumer: NixlNode, prompt: tuple[int, ...] = PROMPT):
    """One whole transfer; returns what became of it at the consumer."""
    address = producer.address
    producer.call("submit", name, prompt, Role.PRODUCE)
    consumer.call("submit", name, prompt, Role.CONSUME, 4, address)
    return consumer.call("result", name)


def test_a_consumer_is_killed_while_the_producer_writes_and_another_is_served() -> None:
    prompt = tuple(range(1_500))
    with (
        NixlNode("P", layers=16) as producer,
        NixlNode("D", layers=16) as first,
        NixlNode("E", layers=16) as second,
    ):
        for node in (producer, first, second):
            node.ready()
        address = producer.address
        first.call("submit", "t", prompt, Role.CONSUME, 4, address)
        producer.call("submit", "t", prompt, Role.PRODUCE)
        until(lambda: first.call("written"))
        first.kill()
        generation = transfer("u", producer, second)
        assert (generation.reason, generation.tokens) == (None, right(PROMPT, 16))
        # No error of NIXL proves that a WRITE has stopped reading: such a source stays pinned.
        unknown = producer.call("counters").get("write_unknown", 0)
        pinned = -(-(len(prompt) + 1) // 16) if unknown else 0
        until(lambda: producer.call("free") == BLOCKS - pinned)


def test_a_producer_is_killed_and_its_successor_on_the_same_port_serves() -> None:
    with NixlNode("D", changes={**PATIENT, "waiting": seconds(2)}) as consumer:
        with NixlNode("P", changes=PATIENT) as producer:
            consumer.ready()
            address = producer.ready().address
            began = time.monotonic()
            consumer.call("submit", "t", PROMPT, Role.CONSUME, 4, address)
            # Links keep order: once a later transfer is through, this one has been registered.
            assert transfer("before", producer, consumer).reason is None
        with NixlNode("P", port=address.port, changes=PATIENT) as producer:
            generation = consumer.call("result", "t")
            assert generation.tokens == right(PROMPT)
            assert generation.prefilled
            assert generation.reason in (Reason.LINK_LOST, Reason.UNREACHABLE, Reason.WAITED)
            assert time.monotonic() - began < 25
            blocks = -(-(len(PROMPT) + 4) // 16)
            assert consumer.call("free") == BLOCKS - blocks, (
                "NIXL bounds nothing: what a dead producer was told of stays quarantined"
            )
            producer.ready()
            generation = transfer("u", producer, consumer)
            assert (generation.reason, generation.tokens) == (None, right(PROMPT))
            assert consumer.call("free") == BLOCKS - blocks
            counters = consumer.call("counters")
            assert sum(counters[each] for each in counters if each.startswith("not_delivered")) >= 1
            assert not consumer.call("stop", 0.2), "the quarantined blocks may still be written"


def test_both_stop_cleanly_and_a_short_transfer_takes_little() -> None:
    with NixlNode("P", changes=PATIENT) as producer, NixlNode("D", changes=PATIENT) as consumer:
        producer.ready()
        consumer.ready()
        for index in range(20):
            producer.call("submit", f"trip-{index}", (1, 2, 3), Role.PRODUCE)
        trips = consumer.call("round_trips_ms", 20, producer.address)
        print(f"round trip: median {statistics.median(trips):.2f} ms, least {min(trips):.2f} ms")
        assert len(trips) == 20
        assert consumer.call("stop", 5.0)
        assert producer.call("stop", 5.0)
        assert consumer.call("free") == producer.call("free") == BLOCKS

"""Two processes over real NIXL: kill -9 on either side, and a successor on the same port."""

from __future__ import annotations

import secrets
import statistics
import time
from pathlib import Path

import pytest
from attrs import evolve
from tests.runtime.keys import Authority, own_address
from tests.runtime.nixl_node import BLOCKS, BOUNDED, DEATH_BOUND_S, NixlNode
from tests.runtime.node import QUICK, until

from pushkv.core.effects import ProducerAddress
from pushkv.core.ids import EngineId, TransferId, seconds
from pushkv.core.messages import Reason
from pushkv.runtime import Runtime, RuntimeConfig, SharedSecret
from pushkv.runtime.credentials import Credentials
from pushkv.testing.reference_engine import ReferenceCache, ReferenceEngine, Role, generate
from pushkv.testing.transport_faults import Fate, Stage, TransportFaults
from pushkv.transport import load_transport

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]

PROMPT = tuple(range(100))
LOST = (Reason.LINK_LOST, Reason.UNREACHABLE, Reason.WAITED)
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
            assert generation.reason in LOST
            assert time.monotonic() - began < 25
            # The kernel says that the first one is dead: nothing stays quarantined.
            until(lambda: consumer.call("free") == BLOCKS)
            producer.ready()
            generation = transfer("u", producer, consumer)
            assert (generation.reason, generation.tokens) == (None, right(PROMPT))
            assert consumer.call("free") == BLOCKS
            counters = consumer.call("counters")
            assert sum(counters[each] for each in counters if each.startswith("not_delivered")) >= 1
            assert consumer.call("stop", 5.0), "nobody can write here any more"


def test_a_producer_that_is_stopped_is_not_dead() -> None:
    """R14: whoever is silent may go on where it was, and write."""
    with (
        NixlNode("P", changes=PATIENT) as producer,
        NixlNode("D", changes={**PATIENT, "waiting": seconds(2)}) as consumer,
        NixlNode("E", changes={**PATIENT, "waiting": seconds(2)}) as other,
    ):
        address = producer.ready().address
        for node in (consumer, other):
            node.ready().call(
                "submit", "t" + str(node.process.pid), PROMPT, Role.CONSUME, 4, address
            )
            assert transfer("before" + str(node.process.pid), producer, node).reason is None
        producer.pause()
        for node in (consumer, other):
            generation = node.call("result", "t" + str(node.process.pid))
            assert (generation.prefilled, generation.tokens) == (True, right(PROMPT))
            assert generation.reason in LOST
            assert "not_delivered_writer_gone" not in node.call("counters")
        time.sleep(2 * DEATH_BOUND_S)
        assert consumer.call("free") < BLOCKS
        assert not other.call("stop", 0.2), "the quarantined blocks may still be written"
        producer.resume()
        until(lambda: consumer.call("free") == BLOCKS)


@pytest.mark.parametrize("is_late", [False, True])
def test_the_death_of_who_was_written_to_frees_a_source_that_may_still_be_read(
    is_late: bool,
) -> None:
    """R14: NIXL hangs in a post to a dead peer over LIBFABRIC, and never says that it is over.

    It is noticed before, or after, the death of the peer.
    """
    cache = ReferenceCache(layers=2, block_count=BLOCKS)
    transport = TransportFaults(load_transport("nixl", BOUNDED))
    transport.fate("t", Fate.UNKNOWN_BUSY)
    if is_late:
        transport.hold(Stage.COMPLETION, "t")
    policy = evolve(QUICK, **PATIENT | {"hold": seconds(2)})
    runtime = Runtime(RuntimeConfig(EngineId("P"), cache.layout, policy=policy), transport)
    engine = ReferenceEngine(cache, runtime.bridge)
    with NixlNode("D", changes=PATIENT) as consumer:
        runtime.start()
        engine.start()
        try:
            address = ProducerAddress(*runtime.address)
            consumer.ready().call("submit", "t", PROMPT, Role.CONSUME, 4, address)
            engine.submit(TransferId("t"), PROMPT, Role.PRODUCE)
            until(lambda: transport.posted, 30)
            if not is_late:
                assert consumer.call("result", "t").prefilled
            time.sleep(2 * DEATH_BOUND_S)
            assert len(cache.free) < BLOCKS
            consumer.kill()
            time.sleep(2 * DEATH_BOUND_S)
            transport.release(Stage.COMPLETION, "t")
            until(lambda: len(cache.free) == BLOCKS)
        finally:
            runtime.stop(5.0)
            engine.stop()


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


@pytest.mark.parametrize("kind", ["shared secret", "certificates"])
def test_two_processes_reach_each_other_over_tls_alone(tmp_path: Path, kind: str) -> None:
    host = own_address()
    if host is None:
        pytest.skip("this machine has no address but loopback")
    known = tmp_path / "secret"
    known.write_text(secrets.token_hex(32))
    ours: Credentials = SharedSecret(known)
    theirs: Credentials = ours
    if kind == "certificates":
        authority = Authority(tmp_path)
        ours, theirs = (authority.sign(name, (name,)) for name in ("P", "D"))
    strange = tmp_path / "another"
    strange.write_text(secrets.token_hex(32))
    with (
        NixlNode("P", changes=PATIENT, listen_host=host, credentials=ours) as producer,
        NixlNode("D", changes=PATIENT, listen_host=host, credentials=theirs) as consumer,
        NixlNode(
            "S", changes={"waiting": seconds(1)}, credentials=SharedSecret(strange)
        ) as stranger,
    ):
        for node in (producer, consumer, stranger):
            node.ready()
        assert producer.address.host == host
        stranger.call("submit", "t", PROMPT, Role.CONSUME, 4, producer.address)
        generation = stranger.call("result", "t")
        assert (generation.reason, generation.tokens) == (Reason.UNREACHABLE, right(PROMPT))
        generation = transfer("u", producer, consumer)
        assert (generation.reason, generation.tokens) == (None, right(PROMPT))
        assert not generation.prefilled
        assert producer.call("counters")["tls_failed"] >= 1
        assert "tls_failed" not in consumer.call("counters")

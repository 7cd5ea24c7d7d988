"""Starting, stopping and dying: nobody hangs, nothing leaks, and each error says what is wrong."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.runtime.node import BLOCKS, QUICK, Node, right, until, watch_registrations
from tests.runtime.test_channel import HELLO

from pushkv.core.effects import (
    PeerJoined,
    PermitEnded,
    PostWrite,
    ProducerAddress,
    Report,
    SourceReleased,
)
from pushkv.core.endpoint import Endpoint
from pushkv.core.errors import ConfigurationError, LocalProtocolError, TransportError
from pushkv.core.events import Arrived, Event, WriteClosed
from pushkv.core.ids import (
    AttemptId,
    EngineId,
    Epoch,
    Incarnation,
    Instant,
    Part,
    TransferId,
    Worker,
    seconds,
)
from pushkv.core.messages import Reason
from pushkv.layout import join_memory
from pushkv.model.faults import Fault, FaultRule
from pushkv.runtime import Bridge, Runtime, RuntimeConfig
from pushkv.runtime.loop import Loop
from pushkv.runtime.outbound import Outbound
from pushkv.runtime.steps import Steps
from pushkv.testing.reference_engine import ReferenceCache, prompt_digest
from pushkv_memory import CAPABILITIES, MemoryFabric, MemoryTransport

PROMPT = tuple(range(100))


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    yield
    until(lambda: threads_of_runtimes() == [])
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files


class Closing(MemoryTransport):
    """Says when it is closed."""

    closed = 0

    def close(self, timeout_s: float) -> bool:
        self.closed += 1
        return super().close(timeout_s)


def make(transport: MemoryTransport | None = None, **config: Any) -> Runtime:
    cache = ReferenceCache(layers=1, block_count=4)
    config = {"policy": QUICK, **config}
    return Runtime(
        RuntimeConfig(EngineId("E"), cache.layout, **config),
        transport or MemoryTransport(MemoryFabric()),
    )


def threads_of_runtimes() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("pushkv-")]


# -- configuration


def test_plaintext_beyond_loopback_must_be_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError, match=r"listen_host = '10\.0\.0\.1'.*plaintext=True"):
        make(listen_host="10.0.0.1")
    runtime = make(listen_host="0.0.0.0", plaintext=True, advertise_host="127.0.0.1")
    runtime.start()
    assert any("plaintext" in each for each in caplog.messages)
    assert runtime.address[0] == "127.0.0.1"
    assert runtime.stop()


def test_peers_cannot_dial_every_address() -> None:
    with pytest.raises(ConfigurationError, match=r"advertise_host = ''.*cannot dial '0\.0\.0\.0'"):
        make(listen_host="0.0.0.0", plaintext=True)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"listen_host": "no-such-host.invalid", "plaintext": True}, "listen = 'no-such-host"),
        ({"model": {"weights": "w" * 2_000}}, r"hello\.model"),
        ({"advertise_host": "h" * 300}, r"hello\.directory"),
        ({"cores": frozenset({9_999})}, r"cores = \[9999\]"),
        ({"trace_path": Path("/proc/no/such/trace")}, "trace_path = '/proc/no/such/trace'"),
    ],
)
def test_what_cannot_be_started_is_named(config: dict[str, Any], named: str) -> None:
    transport = Closing(MemoryFabric())
    runtime = make(transport, **config)
    with pytest.raises(ConfigurationError, match=named):
        runtime.start()
    assert threads_of_runtimes() == []
    runtime.stop()
    assert transport.closed == (0 if transport._port is None else 1)


def test_a_port_in_use_is_named_and_the_transport_never_started() -> None:
    transport = Closing(MemoryFabric())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        runtime = make(transport, listen_port=port)
        with pytest.raises(ConfigurationError, match=rf"listen = '127\.0\.0\.1:{port}'.*in use"):
            runtime.start()
    assert threads_of_runtimes() == []
    assert transport._port is None
    assert runtime.stop(), "nobody was ever told of the memory"


@pytest.mark.parametrize("error", [TransportError("no fabric"), RuntimeError("no fabric")])
def test_a_transport_that_cannot_start_is_a_transport_error(error: Exception) -> None:
    class Broken(Closing):
        def start(self, *_: object) -> None:
            raise error

    transport = Broken(MemoryFabric())
    runtime = make(transport)
    with pytest.raises(TransportError, match="no fabric"):
        runtime.start()
    assert threads_of_runtimes() == []
    assert transport.closed == 0
    runtime.stop()


def test_a_runtime_starts_once() -> None:
    runtime = make()
    runtime.start()
    with pytest.raises(LocalProtocolError, match="started once"):
        runtime.start()
    assert runtime.stop()
    with pytest.raises(LocalProtocolError, match="started once"):
        runtime.start()


def test_the_engine_waits_out_the_restart_grace_but_peers_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fabric = MemoryFabric(capabilities=evolve(CAPABILITIES, reaches_successor=True))
    node = Node(fabric, "D", changes={"lease": seconds(0.4)})
    before = time.monotonic()
    with node:
        assert time.monotonic() - before >= 0.4, "R13"
        generation = node.consume("t", PROMPT, ProducerAddress("127.0.0.1", 1)).result(10)
        assert generation.reason is not Reason.STARTING, "the grace is over once start returns"


# -- stopping


def test_stopping_before_the_start_and_twice() -> None:
    transport = Closing(MemoryFabric())
    runtime = make(transport)
    assert runtime.stop()
    assert runtime.stop()
    with pytest.raises(LocalProtocolError, match="started once"):
        runtime.start()
    runtime = make(transport)
    runtime.start()
    assert runtime.stop()
    assert runtime.stop()
    assert transport.closed == 1
    assert threads_of_runtimes() == []


def test_a_consumer_that_stops_gets_its_blocks_back_first() -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P", changes={"expected": seconds(5)}) as producer, Node(fabric, "D") as one:
        result = one.consume("t", PROMPT, producer.address)
        until(lambda: one.free < BLOCKS)
        assert one.runtime.stop(5)
        generation = result.result(10)
        assert generation.reason is Reason.CLOSED
        assert generation.tokens == right(PROMPT)
        until(lambda: one.free == BLOCKS)


@pytest.mark.parametrize("sent", [False, True])
def test_a_producer_that_stops_tells_its_consumers_first(
    sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would see a link that ended, and quarantine the blocks."""
    seen = watch_registrations(monkeypatch)
    fabric = MemoryFabric()
    with Node(fabric, "P", changes={"expected": seconds(9)}) as producer, Node(fabric, "D") as one:
        told = watch_reports(producer.runtime.bridge, monkeypatch)
        result = one.consume("t", PROMPT, producer.address)
        until(lambda: seen)
        if sent:
            arrived = Arrived(TransferId("t"), prompt_digest(PROMPT))
            producer.runtime.bridge.submit(arrived)  # and its prefill never ends
        assert producer.runtime.stop(5)
        assert result.result(10).reason is Reason.CLOSED
        until(lambda: one.free == BLOCKS)
        assert "link_lost" not in str(one.runtime.counters)
        assert told == ([SourceReleased(TransferId("t"), Reason.CLOSED)] if sent else [])


def watch_reports(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    told: list[Report] = []
    report = bridge.report

    def watched(each: Report) -> None:
        told.append(each)
        report(each)

    monkeypatch.setattr(bridge, "report", watched)
    return told


def test_stopping_waits_for_writes_that_are_under_way() -> None:
    delay = seconds(0.2)
    fabric = MemoryFabric(faults=[FaultRule(Fault.DELAY, 1_000_000, least=delay, most=delay)])
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        producer.produce("t", PROMPT)
        result = consumer.consume("t", PROMPT, producer.address)
        until(lambda: fabric.in_flight)
        assert producer.runtime.stop(5)
        assert fabric.in_flight == 0
        assert result.result(10).reason in (Reason.CLOSED, None), "the verdict left after them (R8)"
        until(lambda: consumer.free == BLOCKS)


def test_a_peer_that_does_not_answer_makes_stop_say_so_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = watch_registrations(monkeypatch)
    fabric = MemoryFabric()
    slow = {"expected": seconds(9), "lease": seconds(9)}  # no fence passes meanwhile
    with Node(fabric, "P", changes=slow) as producer, Node(fabric, "D", changes=slow) as one:
        one.consume("t", PROMPT, producer.address)
        until(lambda: one.free < BLOCKS)
        until(lambda: seen)
        happen = Loop._happen

        def deaf(self: Loop, event: Event) -> None:
            if self._bridge is not producer.runtime.bridge:
                happen(self, event)

        monkeypatch.setattr(Loop, "_happen", deaf)
        offered = BLOCKS - one.free
        before = time.monotonic()
        stopping = threading.Thread(target=one.runtime.stop, args=(1.0,))
        stopping.start()
        until(lambda: one.runtime.bridge._closed)
        assert not one.runtime._ended.is_set(), "offers are refused from the start of the drain on"
        late = one.consume("late", PROMPT, producer.address)
        assert late.result(10).reason is Reason.CLOSED
        until(lambda: one.free == BLOCKS - offered)
        stopping.join()
        assert time.monotonic() - before < 3
        assert not one.runtime.stop(), "the peer may still write"
        assert one.free == BLOCKS - offered


def test_after_the_stop_requests_are_computed_locally_and_no_block_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        assert consumer.runtime.stop()
        assert producer.runtime.stop()
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert (generation.reason, generation.tokens) == (Reason.CLOSED, right(PROMPT))
        producer.produce("t", PROMPT).result(10)
        until(lambda: producer.free == consumer.free == BLOCKS)
        lines = [vars(each) for each in caplog.records if each.name == "pushkv.transfers"]
        assert [(each["transfer"], each["cause"], each["phase"]) for each in lines] == [
            ("t", "endpoint_closed", "runtime"),  # not delivered
            ("t", "endpoint_closed", "runtime"),  # not served
        ]
        assert consumer.runtime.counters == {"not_delivered_endpoint_closed": 1}
        assert producer.runtime.counters == {"not_served_endpoint_closed": 1}


# -- dying


class BoomError(Exception):
    pass


def die_at(monkeypatch: pytest.MonkeyPatch, node: Node, transfer: str) -> None:
    """Let the endpoint of `node` raise what nobody expects when `transfer` is cancelled."""
    handle = Endpoint.handle

    def broken(self: Endpoint, event: Event, now: Instant) -> list[Any]:
        if getattr(event, "transfer", None) == transfer:
            raise BoomError(transfer)
        return handle(self, event, now)

    monkeypatch.setattr(Endpoint, "handle", broken)


def test_a_loop_that_dies_fails_every_transfer_and_releases_no_block(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pushkv")
    fabric = MemoryFabric()
    transport = Closing(fabric)
    with Node(fabric, "P", changes={"expected": seconds(9)}) as producer:
        consumer = Node(fabric, "D")
        consumer.runtime.stop()
        consumer.runtime = Runtime(consumer.config, transport)
        consumer.engine._bridge = consumer.runtime.bridge
        with consumer:
            names = ["a", "b"]
            results = [consumer.consume(name, PROMPT[:32], producer.address) for name in names]
            until(lambda: consumer.free == BLOCKS - 6)
            die_at(monkeypatch, consumer, "poison")
            poisoned = consumer.consume("poison", PROMPT[:32], producer.address)
            for result in (*results, poisoned):
                generation = result.result(10)
                assert generation.reason is Reason.CLOSED
                assert generation.tokens == right(PROMPT[:32])
            until(lambda: transport.closed == 1)
            assert consumer.free == BLOCKS - 9, "nobody knows who writes into the old blocks"
            late = consumer.consume("late", PROMPT[:32], producer.address).result(10)
            assert late.reason is Reason.CLOSED
            assert consumer.free == BLOCKS - 9, "the late one's blocks were never registered"
            critical = [each for each in caplog.records if each.levelno == logging.CRITICAL]
            assert len(critical) == 1
            assert critical[0].exc_info is not None
            assert "BoomError" in caplog.text
            cut = [each for each in caplog.records if getattr(each, "phase", None) == "runtime"]
            assert sorted(vars(each)["transfer"] for each in cut) == ["a", "b", "late", "poison"]
            assert {each.levelno for each in cut} == {logging.WARNING}
            assert consumer.runtime.counters["not_delivered_endpoint_closed"] == 4
            until(lambda: threads_of_runtimes() == ["pushkv-P-0"])
            assert not consumer.runtime.stop()


def test_a_loop_that_dies_closes_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        producer.produce("t", PROMPT)
        assert consumer.consume("t", PROMPT, producer.address).result(10).reason is None
        die_at(monkeypatch, producer, "poison")
        producer.produce("poison", PROMPT)
        until(producer.runtime._ended.is_set)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(producer.runtime.address, timeout=5)


# -- what must not matter


def test_a_trace_on_a_full_disk_costs_no_transfer(caplog: pytest.LogCaptureFixture) -> None:
    fabric = MemoryFabric()
    full = Path("/dev/full")
    with Node(fabric, "P") as producer, Node(fabric, "D", trace_path=full) as consumer:
        for name in ("a", "b"):
            producer.produce(name, PROMPT)
            assert consumer.consume(name, PROMPT, producer.address).result(10).reason is None
        until(lambda: producer.free == consumer.free == BLOCKS)
        ends = [each for each in caplog.messages if each.startswith("the trace /dev/full ends")]
        assert len(ends) == 1


def test_memory_that_cannot_be_read_fails_its_writes_and_is_forgotten_with_its_link() -> None:
    calls: list[str] = []

    class Recording(MemoryTransport):
        def add_peer(self, peer: Worker, memory: bytes) -> None:
            calls.append("add")

        def remove_peer(self, peer: Worker) -> None:
            calls.append("remove")

    cache = ReferenceCache(layers=1, block_count=4)
    failed: list[WriteClosed] = []
    transport = Recording(MemoryFabric())
    outbound = Outbound(cache.layout, transport, 1, Steps(), failed.append, lambda: 0)
    peer = Worker(EngineId("D"), Incarnation(1), 0)
    bad = evolve(HELLO, layout=cache.layout.description(), memory=b"garbage")
    good = evolve(bad, memory=join_memory(cache.layout, b"memory"))
    attempt = AttemptId(peer.engine, peer.incarnation, 0, 0, TransferId("t"), 0)
    write = PostWrite(attempt, Epoch(1, 1), Part(0, 0, 16), ((0,),), 16, ((0,),), 0, 1)

    outbound.joined(PeerJoined(peer, bad))
    outbound.order(write)
    outbound.post()
    assert [each.outcome for each in failed] == ["failed"]
    assert outbound.open_writes == 0
    outbound.joined(PeerJoined(peer, good))
    outbound.ended(PermitEnded(Epoch(1, 1), peer))
    assert calls == ["add"], "the newer link still needs it"
    outbound.ended(PermitEnded(Epoch(2, 2), peer))
    assert calls == ["add", "remove"]
    outbound.joined(PeerJoined(peer, bad))
    outbound.ended(PermitEnded(Epoch(3, 3), peer))
    assert calls == ["add", "remove"], "it was never added"

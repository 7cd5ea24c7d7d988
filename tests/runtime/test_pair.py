"""Two runtimes over real sockets and memory: what goes right, and each way it may not."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import evolve
from tests.runtime.node import BLOCKS, Node, right, until, watch_registrations

from pushkv.core.effects import ProducerAddress
from pushkv.core.errors import ConfigurationError
from pushkv.core.events import Cancelled, PrefillAborted
from pushkv.core.ids import TransferId, Worker, seconds
from pushkv.core.messages import Reason
from pushkv.model.faults import Fault, FaultRule
from pushkv.runtime.loop import Loop
from pushkv_memory import MemoryFabric

PROMPT = tuple(range(100))


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger="pushkv"):
        yield


def lines(caplog: pytest.LogCaptureFixture, transfer: str, verb: str = "not delivered"):
    """The structured lines about a transfer."""
    return [
        each
        for each in caplog.records
        if getattr(each, "transfer", None) == transfer and verb in each.getMessage()
    ]


def worker(node: Node) -> Worker:
    return Worker(node.config.engine, node.config.incarnation, node.config.rank)


@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_a_transfer_gives_the_tokens_of_a_lone_engine(first: str) -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        if first == "producer":
            producer.produce("t", PROMPT).result(10)
        result = consumer.consume("t", PROMPT, producer.address)
        if first == "consumer":
            producer.produce("t", PROMPT)
        generation = result.result(10)
        assert generation.tokens == right(PROMPT)
        assert not generation.prefilled
        until(lambda: producer.free == consumer.free == BLOCKS)
        assert producer.runtime.stop()
        assert consumer.runtime.stop()


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        ({"model": {"weights": "a"}}, {"model": {"weights": "b"}}, "model.weights: a | b"),
        ({"changes": {"lease": seconds(0.9)}}, {"changes": {"lease": seconds(0.8)}}, "lease"),
    ],
)
def test_peers_that_do_not_fit_are_refused_with_both_values_named(
    ours: dict[str, Any], theirs: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P", **ours) as producer, Node(fabric, "D", **theirs) as consumer:
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert generation.reason is Reason.REFUSED
        assert generation.tokens == right(PROMPT), "computed by the consumer itself"
        until(lambda: producer.runtime.counters["refused_by_peer"] == 1)
        assert consumer.runtime.counters["hello_refused"] == 1
        refusals = [each for each in caplog.messages if named in each]
        assert refusals, caplog.messages
        assert any("refused" in each for each in refusals)
        assert consumer.free == BLOCKS
        (line,) = lines(caplog, "t")
        assert (line.cause, line.phase) == (Reason.REFUSED, "consumer.registering")


def test_another_layout_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    fabric = MemoryFabric()
    other = Node(fabric, "D")
    layout = evolve(other.cache.layout, dtype="float16")
    with Node(fabric, "P") as producer, Node(fabric, "D", layout=layout) as consumer:
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert generation.reason is Reason.REFUSED
        until(lambda: any("layout.dtype: uint8 | float16" in each for each in caplog.messages))
    other.runtime.stop()


def test_another_engine_at_the_address_gets_no_block(caplog: pytest.LogCaptureFixture) -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        address = evolve(producer.address, engine="Q")
        generation = consumer.consume("t", PROMPT, address).result(10)
        assert generation.reason is Reason.ADDRESS
        assert consumer.free == BLOCKS
        assert len(lines(caplog, "t")) == 1
        assert fabric.history == ()


def test_another_prompt_under_the_same_name_is_never_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        producer.produce("t", PROMPT).result(10)
        other = tuple(reversed(PROMPT))
        generation = consumer.consume("t", other, producer.address).result(10)
        assert generation.reason is Reason.PROMPT
        assert generation.tokens == right(other)
        assert fabric.history == (), "no byte was written"
        (line,) = lines(caplog, "t")
        assert line.levelno == logging.WARNING
        assert (line.cause, line.attempt, line.rank) == (Reason.PROMPT, 0, 0)
        assert (line.peer_engine, line.peer_rank) == ("P", 0)
        assert line.peer_incarnation == producer.config.incarnation
        assert line.phase in ("consumer.registering", "consumer.registered")
        assert f"{producer.config.incarnation:016x}" in line.getMessage()
        assert f"127.0.0.1:{producer.address.port}" in line.getMessage()
        assert consumer.runtime.counters["not_delivered_prompt_mismatch"] == 1
        until(lambda: producer.free == BLOCKS)
        (source,) = lines(caplog, "t", "not served")
        assert (source.cause, source.phase) == (Reason.EXPIRED, "producer.holding")


def test_a_transfer_id_that_is_live_is_refused_and_the_first_goes_on() -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        first = consumer.consume("t", PROMPT, producer.address)
        second = consumer.consume("t", PROMPT, producer.address)
        assert "transfer = 't'" in str(second.exception(10))
        produced = producer.produce("t", PROMPT)
        assert first.result(10).tokens == right(PROMPT)
        produced.result(10)
        until(lambda: producer.free == consumer.free == BLOCKS)
        again = consumer.consume("t", PROMPT, producer.address)
        producer.produce("t", PROMPT)
        assert again.result(10).tokens == right(PROMPT)


def held(fabric_delay_s: float) -> MemoryFabric:
    """Every WRITE takes that long."""
    delay = seconds(fabric_delay_s)
    return MemoryFabric(faults=[FaultRule(Fault.DELAY, 1_000_000, least=delay, most=delay)])


@pytest.mark.parametrize("phase", ["registering", "registered", "writing"])
def test_a_cancel_gives_the_blocks_back_in_every_phase(
    phase: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = watch_registrations(monkeypatch)
    fabric = held(0.15)
    with Node(fabric, "P", changes={"expected": seconds(5)}) as producer, Node(fabric, "D") as one:
        address = producer.address
        if phase == "registering":
            address = ProducerAddress("127.0.0.1", 1)
        result = one.consume("t", PROMPT, address)
        if phase == "registering":
            until(lambda: one.free < BLOCKS)
        else:
            until(lambda: registered)
        if phase == "writing":
            producer.produce("t", PROMPT)
            until(lambda: fabric.in_flight)
        one.engine.cancel(TransferId("t"))
        until(result.cancelled)
        until(lambda: one.free == BLOCKS)
        assert not fabric.in_flight, "released while a WRITE was still landing (R8)"
        (line,) = lines(caplog, "t")
        assert line.levelno == logging.INFO, "a client's wish is no warning"
        assert line.cause == Reason.CANCELLED
        assert one.runtime.counters["not_delivered_cancelled"] == 1


def test_the_producer_aborts() -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        producer.produce("t", PROMPT).result(10)
        producer.runtime.bridge.submit(PrefillAborted(TransferId("t")))
        until(lambda: producer.free == BLOCKS)
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert generation.reason is Reason.ABORTED
        until(lambda: consumer.free == BLOCKS)


def test_a_request_that_the_producer_never_gets_fails_within_its_bound() -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        began = time.monotonic()
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert generation.reason is Reason.NEVER_ARRIVED
        assert time.monotonic() - began < 5
        until(lambda: consumer.free == BLOCKS)


def test_nobody_at_the_address_fails_within_the_waiting_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Node(MemoryFabric(), "D", changes={"waiting": seconds(0.3)}) as consumer:
        nowhere = ProducerAddress("127.0.0.1", 1)
        generation = consumer.consume("t", PROMPT, nowhere).result(10)
        assert generation.reason is Reason.UNREACHABLE
        assert consumer.free == BLOCKS
        (line,) = lines(caplog, "t")
        assert line.peer_engine is None
        assert "peer unknown at 127.0.0.1:1" in line.getMessage()


def test_more_exposed_blocks_than_the_budget_are_not_offered() -> None:
    fabric = MemoryFabric()
    changes = {"exposed_blocks": 7}
    with Node(fabric, "P") as producer, Node(fabric, "D", changes=changes) as consumer:
        first = consumer.consume("fits", PROMPT, producer.address)
        second = consumer.consume("too many", PROMPT, producer.address).result(10)
        assert (second.reason, second.tokens) == (Reason.BUDGET, right(PROMPT))
        producer.produce("fits", PROMPT)
        assert first.result(10).reason is None
        producer.produce("later", PROMPT)
        later = consumer.consume("later", PROMPT, producer.address).result(10)
        assert later.reason is None, "the budget comes back with the blocks"


def test_a_failed_write_is_retried_on_the_same_registration() -> None:
    fabric = MemoryFabric(faults=[FaultRule(Fault.WRITE_FAILURE, script=(0,))])
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        producer.produce("t", PROMPT)
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert (generation.reason, generation.tokens) == (None, right(PROMPT))
        assert producer.runtime.counters["write_failed"] == 1


def test_writes_that_keep_failing_are_retried_as_an_attempt_then_computed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fabric = MemoryFabric(faults=[FaultRule(Fault.WRITE_FAILURE, 1_000_000)])
    with Node(fabric, "P", changes={"hold": seconds(5)}) as producer, Node(fabric, "D") as consumer:
        producer.produce("t", PROMPT).result(10)
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert generation.prefilled
        assert generation.tokens == right(PROMPT)
        until(lambda: consumer.free == BLOCKS)
        failed = lines(caplog, "t")
        assert [each.attempt for each in failed] == [0, 1], "policy.attempts is 2"


def test_a_retry_reaches_the_same_producer() -> None:
    # One attempt's WRITEs fail: the first and its two retries.
    fabric = MemoryFabric(faults=[FaultRule(Fault.WRITE_FAILURE, 1_000_000, budget=3)])
    with Node(fabric, "P", changes={"hold": seconds(5)}) as producer, Node(fabric, "D") as consumer:
        producer.produce("t", PROMPT).result(10)
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert not generation.prefilled
        assert generation.reason is Reason.WRITE, "why the attempt before failed"
        assert generation.tokens == right(PROMPT)
        until(lambda: producer.free == consumer.free == BLOCKS)


def test_a_producer_that_comes_back_as_another_incarnation_serves_again() -> None:
    fabric = MemoryFabric()
    with Node(fabric, "D") as consumer:
        with Node(fabric, "P") as producer:
            producer.produce("t", PROMPT)
            assert consumer.consume("t", PROMPT, producer.address).result(10).reason is None
            port = producer.address.port
        with Node(fabric, "P", listen_port=port) as producer:
            producer.produce("u", PROMPT)
            generation = consumer.consume("u", PROMPT, producer.address).result(10)
            assert (generation.reason, generation.tokens) == (None, right(PROMPT))


def test_a_writer_that_is_cut_off_costs_the_blocks_until_the_fence() -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        fabric.partition(worker(producer), worker(consumer))
        producer.produce("t", PROMPT)
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert generation.prefilled
        assert generation.tokens == right(PROMPT)
        fabric.heal()
        until(lambda: consumer.free == BLOCKS)


def test_a_bad_event_of_the_engine_harms_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        consumer.runtime.bridge.submit("nonsense")  # type: ignore[arg-type]
        until(lambda: consumer.runtime.counters["local_protocol_error"] == 1)
        assert any("'nonsense' is not an event" in each for each in caplog.messages)
        producer.produce("t", PROMPT)
        assert consumer.consume("t", PROMPT, producer.address).result(10).reason is None


def test_an_idle_pair_turns_for_nothing_but_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0
    turn = Loop._turn

    def counted(self: Loop, inbox: object) -> None:
        nonlocal turns
        turns += 1
        turn(self, inbox)  # type: ignore[arg-type]

    monkeypatch.setattr(Loop, "_turn", counted)
    fabric = MemoryFabric()
    with Node(fabric, "P") as producer, Node(fabric, "D") as consumer:
        for name in ("a", "b", "c"):
            producer.produce(name, PROMPT)
            assert consumer.consume(name, PROMPT, producer.address).result(10).reason is None
        until(lambda: producer.free == consumer.free == BLOCKS)

        def turned() -> int:
            before = turns
            time.sleep(0.9)  # one lease: three PINGs, three GRANTs
            return turns - before

        # The transfers leave a few timers behind, which come up once more.
        assert any(4 <= turned() <= 16 for _ in range(6))
        consumer.runtime.bridge.submit(Cancelled(TransferId("wakes it up")))
        until(lambda: consumer.runtime.counters["unknown_transfer"])


def test_what_follows_from_a_deadline_waits_for_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The retries of a WRITE are due by time; that they fail at once must be noticed at once."""

    def refuse(*_: object) -> None:
        raise ConfigurationError("block", 1, "another one")

    monkeypatch.setattr("pushkv.runtime.outbound.block_map", refuse)
    quiet = {each: seconds(19) for each in ("query", "resend")}
    quiet |= {each: seconds(60) for each in ("lease", "waiting", "hold")}
    fabric = MemoryFabric()
    with (
        Node(fabric, "P", changes=quiet) as producer,
        Node(fabric, "D", changes={**quiet, "attempts": 1}) as consumer,
    ):
        producer.produce("t", PROMPT).result(10)
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert generation.reason is Reason.WRITE
        assert producer.runtime.counters["write_failed"] == 3

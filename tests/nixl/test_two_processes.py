"""The contract of `pushkv.transport`, kept between two processes by real NIXL over UCX."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest
from tests.nixl.nixl_end import FOREVER, RemoteEnd, attempt_id, meet

from pushkv.transport import Arrival, Completion, WriteOutcome

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]

BLOCK = 4096
FABRICS = {"default": {}, "tcp": {"UCX_TLS": "tcp"}}


class Pair:
    """A producer with bytes to write and a consumer with room for them."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.producer = RemoteEnd("P", 1, environment=environment, size_bytes=1 << 25)
        self.consumer = RemoteEnd("D", 2, environment=environment, size_bytes=1 << 25, rank=3)
        self.producer.ready()
        self.consumer.ready()
        meet(self.producer, self.consumer)
        self.producer.call("fill", 1)
        self.attempts = 0

    def scatter(self, count: int, length: int) -> tuple[list[int], list[int]]:
        places = range((1 << 25) // length)
        shuffle = random.Random(count)
        return (
            [at * length for at in shuffle.sample(places, count)],
            [at * length for at in shuffle.sample(places, count)],
        )

    def write(self, source: list[int], destination: list[int], length: int, **how: object) -> int:
        """Order a WRITE between two lists of offsets; returns its attempt number."""
        self.attempts += 1
        addresses = [self.consumer.base + offset for offset in destination]
        more = [how.get("permit_ns", FOREVER), how.get("withdraw_at", 0), how.get("ready")]
        self.producer.call(
            "write", self.consumer.worker, self.attempts, source, addresses, length, *more
        )
        return self.attempts

    def completion(self) -> Completion:
        (event,) = self.producer.call("events", 1)
        assert isinstance(event, Completion)
        return event

    def stop(self) -> None:
        self.producer.stop()
        self.consumer.stop()


@pytest.fixture(scope="module", params=FABRICS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(FABRICS[request.param])
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def fresh(pair: Pair) -> Iterator[None]:
    pair.consumer.call("clear")
    yield
    # Nothing is reported that no test asked for: every completion came once.
    assert pair.producer.call("events", 1, 0.05) == []
    pair.consumer.call("look", False)
    pair.consumer.call("events", 100, 0.05)


@pytest.mark.parametrize(("count", "length"), [(1, BLOCK), (64, 1 << 16), (5000, BLOCK)])
def test_an_arrival_comes_after_all_bytes_and_names_them(
    pair: Pair, count: int, length: int
) -> None:
    source, destination = pair.scatter(count, length)
    expected = pair.producer.call("digest", source, length)
    pair.consumer.call("look", True)

    attempt = pair.write(source, destination, length)

    (event,), digest = pair.consumer.call("arrival", destination, length)
    name = attempt_id(pair.consumer.worker, pair.producer.worker, attempt)
    assert event == Arrival(name, attempt + 100, attempt + 200, count * length)
    assert digest == expected
    assert pair.completion() == Completion(name, attempt + 100, WriteOutcome.DONE, count * length)
    assert pair.consumer.call("events", 1, 0.05) == []


def test_done_means_that_the_bytes_are_visible(pair: Pair) -> None:
    for _ in range(20):
        pair.consumer.call("clear")
        source, destination = pair.scatter(64, 1 << 16)
        pair.write(source, destination, 1 << 16)
        assert pair.completion().outcome is WriteOutcome.DONE
        assert pair.consumer.call("zeros", destination, 1 << 16) == 0


def test_arrivals_wait_for_whoever_looks_later(pair: Pair) -> None:
    for _ in range(3):
        pair.write([0], [0], BLOCK)
        assert pair.completion().outcome is WriteOutcome.DONE
    pair.consumer.call("look", True)
    assert len(pair.consumer.call("events", 3)) == 3


def test_a_write_without_a_permit_is_refused_and_writes_nothing(pair: Pair) -> None:
    pair.write([0], [0], BLOCK, permit_ns=0)
    assert pair.completion().outcome is WriteOutcome.REFUSED
    assert pair.consumer.call("zeros", [0], BLOCK) == 1


def test_the_permit_is_asked_after_everything_else_before_the_post(pair: Pair) -> None:
    pair.write([0], [0], BLOCK, withdraw_at=1)
    assert pair.completion().outcome is WriteOutcome.REFUSED
    assert pair.consumer.call("zeros", [0], BLOCK) == 1


def test_a_permit_withdrawn_between_pieces_fails_the_write_and_stops_it_there(pair: Pair) -> None:
    source, destination = pair.scatter(3000, BLOCK)
    pair.consumer.call("look", True)
    pair.write(source, destination, BLOCK, withdraw_at=2)
    completion = pair.completion()
    assert completion.outcome is WriteOutcome.FAILED
    assert completion.source_idle
    assert "permit" in completion.cause
    assert pair.consumer.call("zeros", destination[:1024], BLOCK) == 0
    assert pair.consumer.call("zeros", destination[1024:], BLOCK) == 3000 - 1024
    assert pair.consumer.call("events", 1, 0.1) == []


def test_a_write_that_waits_for_its_source_ends_with_its_permit(pair: Pair) -> None:
    pair.write([0], [0], BLOCK, ready=False, permit_ns=pair.producer.call("now") + 50_000_000)
    assert pair.completion().outcome is WriteOutcome.REFUSED
    assert pair.consumer.call("zeros", [0], BLOCK) == 1


def test_a_write_of_no_bytes_is_done_and_arrives_nowhere(pair: Pair) -> None:
    pair.consumer.call("look", True)
    pair.write([], [], BLOCK)
    pair.write([0, BLOCK], [0, BLOCK], 0)
    outcomes = [event.outcome for event in pair.producer.call("events", 2)]
    assert outcomes == [WriteOutcome.DONE, WriteOutcome.DONE]
    assert pair.consumer.call("events", 1, 0.1) == []


@pytest.mark.parametrize(
    ("source", "destination", "said"),
    [
        ([(1 << 25) - 100], [0], "source: segment 0"),
        ([0], [(1 << 25) - 100], "destination: segment 0"),
        ([0, BLOCK], [0, -BLOCK], "destination: segment 1"),
    ],
)
def test_memory_that_is_not_registered_fails_the_write_before_a_byte(
    pair: Pair, source: list[int], destination: list[int], said: str
) -> None:
    pair.write(source, destination, BLOCK)
    completion = pair.completion()
    assert completion.outcome is WriteOutcome.FAILED
    assert said in completion.cause
    assert pair.consumer.call("zeros", [0], BLOCK) == 1


def test_a_removed_peer_is_unknown_until_it_is_added_again(pair: Pair) -> None:
    pair.producer.call("remove_peer", pair.consumer.worker)
    pair.write([0], [0], BLOCK)
    completion = pair.completion()
    assert completion.outcome is WriteOutcome.FAILED
    assert "unknown peer" in completion.cause
    pair.producer.call("add_peer", pair.consumer.worker, pair.consumer.memory)
    pair.producer.call("add_peer", pair.consumer.worker, pair.consumer.memory)
    pair.write([0], [0], BLOCK)
    assert pair.completion().outcome is WriteOutcome.DONE


def test_notifications_that_are_not_ours_are_counted_and_dropped(pair: Pair) -> None:
    before = pair.consumer.call("dropped")
    agent = f"pushkv/D/{2:016x}/3"
    for payload in (b"x", b"pkn\x01", b"pkn\x01\xff\xff", b"pkn\x02abc", b"\x00" * 5000):
        pair.producer.call("notify", agent, payload)
    pair.consumer.call("look", True)
    pair.write([0], [0], BLOCK)
    (event,) = pair.consumer.call("events", 1)
    assert isinstance(event, Arrival)
    assert pair.consumer.call("dropped") == before + 5
    assert pair.completion().outcome is WriteOutcome.DONE


def test_two_hundred_transfers_leak_nothing_and_idle_costs_nothing(pair: Pair) -> None:
    source, destination = pair.scatter(32, BLOCK)
    pair.consumer.call("look", True)
    pair.write(source, destination, BLOCK)
    pair.completion()
    before = pair.producer.call("usage"), pair.consumer.call("usage")
    for _ in range(200):
        pair.write(source, destination, BLOCK)
    outcomes = [event.outcome for event in pair.producer.call("events", 200)]
    assert outcomes == [WriteOutcome.DONE] * 200
    assert len(pair.consumer.call("events", 201)) == 201
    assert (pair.producer.call("usage"), pair.consumer.call("usage")) == before
    assert pair.producer.call("handles") == 0
    pair.consumer.call("look", False)
    assert pair.producer.call("cpu", 0.7) < 0.05
    assert pair.consumer.call("cpu", 0.7) < 0.05


def test_a_close_that_runs_out_of_time_says_so_and_can_be_repeated(pair: Pair) -> None:
    """A stopped peer keeps a handle open: the memory must be kept, and the outcome is unknown."""
    producer = RemoteEnd("P", 7, environment=pair.environment).ready()
    victim = RemoteEnd("D", 8, environment=pair.environment).ready()
    meet(producer, victim)
    producer.call("write", victim.worker, 1, [0], [victim.base], BLOCK)
    (event,) = producer.call("events", 1)
    assert event.outcome is WriteOutcome.DONE
    os.kill(victim.process.pid or 0, signal.SIGSTOP)
    try:
        blocks = list(range(0, 1 << 23, BLOCK))
        addresses = [victim.base + at for at in blocks]
        producer.call("write", victim.worker, 2, blocks, addresses, BLOCK)
        assert producer.call("events", 1, 0.2) == []
        assert producer.call("close", 0.2) is False
        (event,) = producer.call("events", 1)
        assert event.outcome is WriteOutcome.UNKNOWN
        assert not event.source_idle
    finally:
        os.kill(victim.process.pid or 0, signal.SIGCONT)
    assert producer.call("close", 10.0) is True
    assert producer.call("events", 1, 0.05) == []
    producer.stop()
    victim.stop()


def test_a_peer_killed_while_it_is_written_to_is_unknown_and_its_successor_is_served(
    pair: Pair,
) -> None:
    size = 192 << 20
    victim = RemoteEnd("D", 20, environment=pair.environment, size_bytes=size)
    producer = RemoteEnd("P", 21, environment=pair.environment, size_bytes=size)
    successor = RemoteEnd("D", 22, environment=pair.environment)
    meet(victim.ready(), producer.ready())
    producer.call("fill", 3)
    victim.call("die_when_written", 0)

    producer.call("write", victim.worker, 1, [0], [victim.base], size)
    (event,) = producer.call("events", 1, 20.0)
    assert event.outcome is WriteOutcome.UNKNOWN
    assert event.length_bytes == 0
    assert event.cause
    for attempt in (2, 3):
        producer.call("write", victim.worker, attempt, [0], [victim.base], BLOCK)
    after = producer.call("events", 2)
    assert [(each.attempt.attempt, each.outcome) for each in after] == [
        (2, WriteOutcome.FAILED),  # the connection is lost: nothing was posted
        (3, WriteOutcome.FAILED),
    ]
    victim.process.join(5)
    assert victim.process.exitcode == -signal.SIGKILL

    producer.call("add_peer", victim.worker, victim.memory)  # connect anew, in vain
    producer.call("write", victim.worker, 4, [0], [victim.base], BLOCK)
    (event,) = producer.call("events", 1)
    assert event.outcome in (WriteOutcome.FAILED, WriteOutcome.UNKNOWN)
    assert producer.call("events", 1, 0.1) == []

    producer.call("add_peer", successor.ready().worker, successor.memory)
    producer.call("write", successor.worker, 5, [BLOCK], [successor.base], BLOCK)
    (event,) = producer.call("events", 1)
    assert event.outcome is WriteOutcome.DONE
    assert successor.call("digest", [0], BLOCK) == producer.call("digest", [BLOCK], BLOCK)
    for end in (victim, producer, successor):
        end.stop()

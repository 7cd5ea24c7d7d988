"""What is NIXL's own between two processes. See tests/conformance for what all must do."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tests.nixl.nixl_end import FOREVER, RemoteEnd, meet

from pushkv.transport import Arrival, Completion, WriteOutcome

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]

BLOCK = 4096
FABRICS = {"default": {}, "tcp": {"UCX_TLS": "tcp"}}


class Pair:
    """A producer with bytes to write and a consumer with room for them."""

    def __init__(self, environment: dict[str, str]) -> None:
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

    def write(
        self, source: list[int], destination: list[int], length: int, withdraw_at: int = 0
    ) -> None:
        """Order a WRITE between two lists of offsets."""
        self.attempts += 1
        addresses = [self.consumer.base + offset for offset in destination]
        more = [source, addresses, length, FOREVER, withdraw_at]
        self.producer.call("write", self.consumer.worker, self.attempts, *more)

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


def test_a_write_of_no_bytes_is_done_and_arrives_nowhere(pair: Pair) -> None:
    pair.consumer.call("look", True)
    pair.write([], [], BLOCK)
    pair.write([0, BLOCK], [0, BLOCK], 0)
    outcomes = [event.outcome for event in pair.producer.call("events", 2)]
    assert outcomes == [WriteOutcome.DONE, WriteOutcome.DONE]
    assert pair.consumer.call("events", 1, 0.1) == []


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


def test_every_handle_is_released(pair: Pair) -> None:
    source, destination = pair.scatter(3000, BLOCK)
    for _ in range(20):
        pair.write(source, destination, BLOCK)
    outcomes = [event.outcome for event in pair.producer.call("events", 20)]
    assert outcomes == [WriteOutcome.DONE] * 20
    assert pair.producer.call("handles") == 0

"""What one end does by itself, or with a peer that is not what it says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.nixl.nixl_end import RemoteEnd, meet

from pushkv.transport import Completion, WriteOutcome

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]

BLOCK = 4096


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[RemoteEnd, RemoteEnd]]:
    """A producer that cannot import torch and knows nobody, and a consumer."""
    producer = RemoteEnd("P", 1, blocked=("torch",))
    consumer = RemoteEnd("D", 2)
    producer.ready()
    yield producer, consumer.ready()
    producer.stop()
    consumer.stop()


def one(end: RemoteEnd, peer: RemoteEnd, attempt: int, address: int | None = None) -> Completion:
    end.call("write", peer.worker, attempt, [0], [address or peer.base], BLOCK)
    (event,) = end.call("events", 1)
    assert isinstance(event, Completion)
    assert event.attempt.attempt == attempt
    return event


def test_metadata_that_is_no_good_fails_writes_until_good_metadata_comes(
    ends: tuple[RemoteEnd, RemoteEnd],
) -> None:
    producer, consumer = ends
    good = consumer.memory
    middle = len(good) // 2
    bad = {
        "empty": (b"", "memory"),
        "text": (b"hello", "memory"),
        "cut": (good[:-1], "digest"),
        "flipped": (good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :], "digest"),
        "somebody else's": (producer.memory, "agent"),
    }
    for number, (what, (memory, said)) in enumerate(bad.items()):
        producer.call("add_peer", consumer.worker, memory)
        event = one(producer, consumer, 10 + number)
        assert event.outcome is WriteOutcome.FAILED, what
        assert said in event.cause, what
    producer.call("add_peer", consumer.worker, good)
    assert one(producer, consumer, 20).outcome is WriteOutcome.DONE


def test_it_runs_without_torch(ends: tuple[RemoteEnd, RemoteEnd]) -> None:
    producer, consumer = ends
    meet(producer, consumer)
    producer.call("fill", 5)
    assert one(producer, consumer, 30).outcome is WriteOutcome.DONE
    assert consumer.call("digest", [0], BLOCK) == producer.call("digest", [0], BLOCK)
    assert "torch" not in producer.call("modules")
    assert "torch" not in consumer.call("modules")


def test_a_write_bound_is_counted_against_the_permit(ends: tuple[RemoteEnd, RemoteEnd]) -> None:
    consumer = ends[1]
    bounded = RemoteEnd("P", 40, write_bound_s=10.0).ready()
    bounded.call("add_peer", consumer.worker, consumer.memory)
    for attempt, permit_s, outcome in (
        (40, 5, WriteOutcome.REFUSED),
        (41, 60, WriteOutcome.DONE),
    ):
        until = bounded.call("now") + permit_s * 1_000_000_000
        bounded.call("write", consumer.worker, attempt, [0], [consumer.base], BLOCK, until)
        (event,) = bounded.call("events", 1)
        assert event.outcome is outcome
    bounded.stop()


def test_a_post_that_outlasts_the_write_bound_is_unknown(
    ends: tuple[RemoteEnd, RemoteEnd],
) -> None:
    consumer = ends[1]
    bounded = RemoteEnd("P", 50, write_bound_s=1e-9).ready()
    bounded.call("add_peer", consumer.worker, consumer.memory)
    event = one(bounded, consumer, 50)
    assert event.outcome is WriteOutcome.UNKNOWN
    assert "write_bound" in event.cause
    assert event.source_idle
    bounded.stop()


def test_a_process_that_forgets_to_close_ends_its_agent_at_exit() -> None:
    code = """
import atexit, threading, time
atexit.register(lambda: print([each.name for each in threading.enumerate()]))
from pushkv.core.ids import EngineId, Incarnation, Worker
from pushkv_nixl import NixlTransport
transport = NixlTransport()
transport.start(Worker(EngineId("P"), Incarnation(70), 0), [], time.monotonic_ns, lambda: None)
transport.look_for_arrivals(True)
print([each.name for each in threading.enumerate()])
"""
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert seen.stdout.splitlines() == ["['MainThread', 'pushkv-nixl-0']", "['MainThread']"]

"""What NIXL says of peers that stand still or die. See tests/conformance for what all must do."""

from __future__ import annotations

import os
import signal

import pytest
from tests.nixl.nixl_end import RemoteEnd, meet

from pushkv.transport import WriteOutcome

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]

BLOCK = 4096
TCP = {"UCX_TLS": "tcp"}


def test_a_close_that_runs_out_of_time_says_so_and_can_be_repeated() -> None:
    """A stopped peer keeps a handle open: the memory must be kept, and the outcome is unknown."""
    producer = RemoteEnd("P", 7, environment=TCP).ready()
    victim = RemoteEnd("D", 8, environment=TCP).ready()
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


def test_a_peer_killed_while_it_is_written_to_is_unknown_and_its_successor_is_served() -> None:
    size = 192 << 20
    victim = RemoteEnd("D", 20, size_bytes=size)
    producer = RemoteEnd("P", 21, size_bytes=size)
    successor = RemoteEnd("D", 22)
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

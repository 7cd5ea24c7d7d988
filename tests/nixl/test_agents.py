"""Agents that wear out, hang, or do not start are replaced, and harm no WRITE but their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.nixl.nixl_end import RemoteEnd, meet
from tests.nixl.test_bytes import ATTEMPT

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import EngineId, Incarnation, Worker
from pushkv.transport import Completion, Permit, Region, Write, WriteOutcome
from pushkv_nixl import NixlTransport, _agents
from pushkv_nixl._guard import Abandoned, Guard
from pushkv_nixl._library import Agent

BLOCK = 4096
FOREVER = 2**62
P, D, E = (Worker(EngineId(name), Incarnation(1), 0) for name in "PDE")


def test_a_guard_gives_up_only_the_call_that_is_still_running() -> None:
    guard = Guard()
    assert not guard.abandon(0), "it is in no call"
    with guard.calling("first"):
        assert not guard.abandon(guard.count - 1), "it is in a later call"
        assert guard.call == "first"
    assert not guard.abandon(guard.count), "that call returned"
    with guard.calling("second"):
        assert guard.abandon(guard.count)
    with pytest.raises(Abandoned), guard.calling("third"):
        pytest.fail("a thread that was given up made a call")


@pytest.mark.parametrize(
    "options",
    [
        {"connections_most": 0},
        {"connections_most": 255},
        {"connections_most": 1.5},
        {"call_timeout_s": 0},
        {"call_timeout_s": float("inf")},
    ],
)
def test_a_wrong_limit_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        NixlTransport(**options)


@pytest.mark.nixl
@pytest.mark.timeout(90)
@pytest.mark.parametrize("environment", [{}, {"UCX_TLS": "tcp"}], ids=["default", "tcp"])
def test_two_hundred_reconnects_leave_descriptors_flat_at_both_ends(
    environment: dict[str, str],
) -> None:
    """UCX leaks one for each, or two; they come back when the agent that connected ends."""
    most = 8
    producer = RemoteEnd("P", 1, environment=environment, connections_most=most).ready()
    consumer = RemoteEnd("D", 2, environment=environment).ready()
    meet(producer, consumer)
    producer.call("fill", 1)
    seen = []
    for attempt in range(200):
        producer.call("write", consumer.worker, attempt, [0], [consumer.base], BLOCK)
        (event,) = producer.call("events", 1)
        assert event.outcome is WriteOutcome.DONE, event.cause
        producer.call("remove_peer", consumer.worker)
        producer.call("add_peer", consumer.worker, consumer.memory)
        if attempt >= 4 * most:  # the first agent stays, and what it leaked, and two overlap
            seen.append((producer.call("descriptors"), consumer.call("descriptors")))
    made, hung = producer.call("agents")
    assert (200 // most - 2 <= made <= 200 // most + 1, hung) == (True, 0)
    room = 8 * most
    for each in zip(*seen, strict=True):
        assert max(each) - min(each) < room, each
    quarter = len(seen) // 4
    for each in zip(*seen, strict=True):
        assert max(each[-quarter:]) <= max(each[:quarter]) + most, "they grow"
    consumer.call("look", True)
    assert len(consumer.call("events", 200)) == 200
    assert producer.call("close", 5.0)
    producer.stop()
    consumer.stop()


@pytest.mark.nixl
def test_writes_in_flight_outlive_the_replacement_of_their_agent() -> None:
    producer = RemoteEnd("P", 1, environment={"UCX_TLS": "tcp"}, connections_most=1).ready()
    consumers = [RemoteEnd("D", 2 + n, environment={"UCX_TLS": "tcp"}).ready() for n in range(2)]
    meet(producer, *consumers)
    producer.call("fill", 1)
    one, other = consumers
    blocks = list(range(0, 1 << 22, BLOCK))
    addresses = [one.base + at for at in blocks]
    written = 0
    while producer.call("agents")[0] < 2:  # one that is busy posting looks worn only later
        assert written < 200
        producer.call("write", one.worker, written, blocks, addresses, BLOCK)
        written += 1
        producer.call("remove_peer", other.worker)
        producer.call("add_peer", other.worker, other.memory)
    events = producer.call("events", written, 20.0)
    assert [each.outcome for each in events] == [WriteOutcome.DONE] * written
    assert one.call("digest", blocks, BLOCK) == producer.call("digest", blocks, BLOCK)
    for end in (producer, *consumers):
        end.stop()


class Hanging:
    """Makes calls of NIXL hang until they are let go, by the peer that they are about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dead: set[str] = set()
        self.let_go = threading.Event()
        self._peers: dict[int, str] = {}
        prepare, post, load = Agent.prepare, Agent.post, Agent.load

        def prepared(agent: Agent, peer: str, *rest: Any) -> int:
            handle = prepare(agent, peer, *rest)
            self._peers[handle] = peer
            return handle

        def posted(agent: Agent, handle: int) -> bool:
            if self._peers[handle] in self.dead:
                self.hang(agent, "post a WRITE")
            return post(agent, handle)

        def loaded(agent: Agent, metadata: bytes) -> str:
            if any(name.encode() in metadata for name in self.dead):
                self.hang(agent, "load a peer")
            return load(agent, metadata)

        monkeypatch.setattr(Agent, "prepare", prepared)
        monkeypatch.setattr(Agent, "post", posted)
        monkeypatch.setattr(Agent, "load", loaded)

    def hang(self, agent: Agent, call: str) -> None:
        with agent._guard.calling(call):
            self.let_go.wait()


class Bed:
    """A producer and two consumers in this process, over real NIXL."""

    def __init__(self, **options: Any) -> None:
        self.memory = {worker: np.zeros(1 << 20, np.uint8) for worker in (P, D, E)}
        self.ends = {worker: NixlTransport(**options) for worker in (P, D, E)}
        for worker, end in self.ends.items():
            region = Region(self.memory[worker].ctypes.data, 1 << 20)
            end.start(worker, [region], time.monotonic_ns, lambda: None)
        self.memory[P][:] = 7
        for worker in (D, E):
            self.ends[P].add_peer(worker, self.ends[worker].memory())

    def write(self, peer: Worker, part: int, ready: Callable[[], bool] | None = None) -> None:
        permit = Permit()
        permit.until_ns = FOREVER
        source = np.array([[self.memory[P].ctypes.data, BLOCK]], np.uint64)
        target = np.array([[self.memory[peer].ctypes.data, BLOCK]], np.uint64)
        self.ends[P].post(Write(peer, ATTEMPT, part, 0, source, target, permit, ready))

    def outcomes(self, count: int) -> dict[int, Completion]:
        found: dict[int, Completion] = {}
        until = time.monotonic() + 20
        while len(found) < count:
            assert time.monotonic() < until, found
            for each in self.ends[P].poll():
                assert isinstance(each, Completion)
                assert each.part not in found, "told twice"
                found[each.part] = each
            time.sleep(0.001)
        return found

    def agents(self) -> _agents.Agents:
        agents = self.ends[P]._agents
        assert agents is not None
        return agents


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    made = Hanging(monkeypatch)
    yield made
    made.let_go.set()


@pytest.mark.nixl
def test_a_post_that_hangs_costs_its_own_write_alone(hanging: Hanging) -> None:
    bed = Bed(call_timeout_s=0.4)
    bed.write(D, 0)
    bed.write(E, 1)
    assert {each.outcome for each in bed.outcomes(2).values()} == {WriteOutcome.DONE}
    hanging.dead.add("pushkv/D/")
    hanging.dead.add(f"pushkv/D/{1:016x}/0")
    bed.write(D, 2)
    bed.write(D, 3)
    for part in range(4, 10):
        bed.write(E, part)
    found = bed.outcomes(8)
    assert (found[2].outcome, found[2].source_idle) == (WriteOutcome.UNKNOWN, False)
    assert "did not return" in found[2].cause
    assert (found[3].outcome, found[3].source_idle) == (WriteOutcome.FAILED, True)
    assert {found[part].outcome for part in range(4, 10)} == {WriteOutcome.DONE}
    bed.write(D, 10)
    assert "hung on this peer" in bed.outcomes(1)[10].cause
    assert len(bed.agents().hung) == 1
    assert bed.ends[P].close(0.2) is False, "its memory may still be read"
    hanging.let_go.set()
    bed.agents().hung[0].join(10)
    assert bed.ends[P].poll() == [], "a call that returns late tells nothing any more"
    assert not bed.memory[D][1:BLOCK].any() or (bed.memory[D][:BLOCK] == 7).all()
    for worker in (D, E):
        assert bed.ends[worker].close(5.0)


@pytest.mark.nixl
def test_nothing_is_posted_any_more_after_too_many_hangs(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_agents, "HUNG_MOST", 2)
    bed = Bed(call_timeout_s=0.2)
    hanging.dead.add(f"pushkv/D/{1:016x}/0")
    for part in range(2):
        bed.ends[P].add_peer(D, bed.ends[D].memory())
        bed.write(D, part)
        assert bed.outcomes(1)[part].outcome is not WriteOutcome.DONE
    bed.write(E, 5)
    told = bed.outcomes(1)[5]
    assert told.outcome is WriteOutcome.FAILED
    assert "restart" in told.cause
    hanging.let_go.set()
    for thread in bed.agents().hung:
        thread.join(10)
    for end in bed.ends.values():
        end.close(5.0)


@pytest.mark.nixl
def test_a_writer_that_does_not_start_fails_its_writes_and_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = Bed(connections_most=1)
    real = Agent.register

    def fails(agent: Agent, table: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(Agent, "register", fails)
    bed.write(E, 0)
    assert bed.outcomes(1)[0].outcome is WriteOutcome.DONE
    bed.ends[P].remove_peer(D)  # a connection is spent
    until = time.monotonic() + 10
    while not bed.agents().receiver.worn:
        assert time.monotonic() < until
        time.sleep(0.001)
    bed.write(E, 1)
    told = bed.outcomes(1)[1]
    assert (told.outcome, "no room" in told.cause) == (WriteOutcome.FAILED, True)
    monkeypatch.setattr(Agent, "register", real)
    bed.agents()._made_ns -= 2_000_000_000
    bed.write(E, 2)
    assert bed.outcomes(1)[2].outcome is WriteOutcome.DONE
    for end in bed.ends.values():
        assert end.close(5.0)

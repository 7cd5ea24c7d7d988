"""The transport that says less, later or worse than the one inside it, and never better."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from attrs import evolve

from pushkv.core.ids import AttemptId, EngineId, Incarnation, TransferId, Worker
from pushkv.testing.transport_faults import Fate, Stage, TransportFaults
from pushkv.transport import Arrival, Completion, Permit, Region, Write, WriteOutcome
from pushkv_memory import MemoryFabric, MemoryTransport

P = Worker(EngineId("P"), Incarnation(1), 0)
D = Worker(EngineId("D"), Incarnation(2), 0)
DONE, FAILED, REFUSED, UNKNOWN = (
    WriteOutcome.DONE,
    WriteOutcome.FAILED,
    WriteOutcome.REFUSED,
    WriteOutcome.UNKNOWN,
)


class Joined:
    """A writer with faults, a reader with faults, and ten bytes at each."""

    def __init__(self) -> None:
        fabric = MemoryFabric()
        self.source = np.arange(10, dtype=np.uint8)
        self.target = np.zeros(10, dtype=np.uint8)
        self.writer = TransportFaults(MemoryTransport(fabric), shows_done=False)
        self.reader = TransportFaults(MemoryTransport(fabric))
        self.rung = 0
        self.permit = Permit()
        self.permit.until_ns = time.monotonic_ns() + 10**12
        for transport, worker, memory in (
            (self.writer, P, self.source),
            (self.reader, D, self.target),
        ):
            region = Region(memory.ctypes.data, 10)
            transport.start(worker, (region,), time.monotonic_ns, self._ring)
        self.writer.add_peer(D, self.reader.memory())
        self.reader.look_for_arrivals(True)

    def _ring(self) -> None:
        self.rung += 1

    def post(self, part: int, transfer: str = "t") -> None:
        attempt = AttemptId(D.engine, D.incarnation, 0, 0, TransferId(transfer), 0)
        source = np.array([[self.source.ctypes.data, 10]], dtype=np.uint64)
        target = np.array([[self.target.ctypes.data, 10]], dtype=np.uint64)
        self.writer.post(Write(D, attempt, part, 7, source, target, self.permit))

    def outcomes(self) -> list[tuple[int, WriteOutcome, bool]]:
        """What the writer is told now: part, outcome, whether its source is idle."""
        told = []
        for news in self.writer.poll():
            assert isinstance(news, Completion)
            told.append((news.part, news.outcome, news.source_idle))
        return told

    def arrivals(self) -> list[int]:
        told = []
        for news in self.reader.poll():
            assert isinstance(news, Arrival)
            told.append(news.part)
        return told

    def landed(self) -> bool:
        return bool(np.array_equal(self.source, self.target))


@pytest.fixture
def joined() -> Iterator[Joined]:
    found = Joined()
    yield found
    assert found.writer.close(1)
    assert found.reader.close(1)


def test_without_a_fault_it_is_the_transport_inside(joined: Joined) -> None:
    joined.post(0)
    assert (joined.outcomes(), joined.arrivals()) == ([(0, DONE, True)], [0])
    assert joined.landed()
    inner = MemoryTransport(MemoryFabric())
    assert joined.reader.capabilities == inner.capabilities
    assert joined.writer.capabilities == evolve(inner.capabilities, done_means_visible=False)
    assert joined.writer.version == inner.version


@pytest.mark.parametrize(("fate", "outcome"), [(Fate.FAILED, FAILED), (Fate.REFUSED, REFUSED)])
def test_what_fails_or_is_refused_was_never_posted(
    joined: Joined, fate: Fate, outcome: WriteOutcome
) -> None:
    joined.writer.fate("t", fate)
    joined.post(0)
    assert joined.rung
    assert (joined.outcomes(), joined.landed()) == ([(0, outcome, True)], False)
    joined.post(1)
    assert (joined.outcomes(), joined.landed()) == ([(1, DONE, True)], True)


@pytest.mark.parametrize(("fate", "idle"), [(Fate.UNKNOWN, True), (Fate.UNKNOWN_BUSY, False)])
def test_what_is_unknown_has_landed_all_the_same(joined: Joined, fate: Fate, idle: bool) -> None:
    joined.writer.fate("t", fate)
    joined.post(0)
    assert (joined.outcomes(), joined.landed()) == ([(0, UNKNOWN, idle)], True)


def test_a_write_that_the_transport_inside_refuses_leaves_its_fate_to_the_next(
    joined: Joined,
) -> None:
    joined.writer.fate("t", Fate.UNKNOWN)
    until, joined.permit.until_ns = joined.permit.until_ns, 0
    joined.post(0)
    assert joined.outcomes() == [(0, REFUSED, True)]
    joined.permit.until_ns = until
    joined.post(1)
    assert joined.outcomes() == [(1, UNKNOWN, True)]


def test_each_stage_is_held_for_its_transfer_alone(joined: Joined) -> None:
    joined.writer.hold(Stage.POST, "t")
    joined.post(0)
    joined.post(1, "other")
    assert joined.outcomes() == [(1, DONE, True)]
    joined.writer.hold(Stage.COMPLETION, "t")
    rung = joined.rung
    joined.writer.release(Stage.POST, "t")
    assert joined.rung > rung
    assert (joined.outcomes(), joined.writer.over("t")) == ([], 1)
    joined.reader.hold(Stage.ARRIVAL, "t")
    assert joined.arrivals() == [1]
    joined.writer.release(Stage.COMPLETION, "t")
    joined.reader.release(Stage.ARRIVAL, "t")
    assert (joined.outcomes(), joined.arrivals()) == ([(0, DONE, True)], [0])


@pytest.mark.parametrize("times", [0, 2])
def test_arrivals_are_lost_or_come_twice(joined: Joined, times: int) -> None:
    joined.reader.arrivals = times
    joined.post(0)
    assert joined.outcomes() == [(0, DONE, True)]
    assert joined.arrivals() == [0] * times


def test_what_is_held_when_it_closes_has_failed_and_is_told(joined: Joined) -> None:
    joined.writer.hold(Stage.POST, "t")
    joined.post(0)
    joined.writer.hold(Stage.COMPLETION, "u")
    joined.post(1, "u")
    assert joined.outcomes() == []
    assert joined.writer.close(1)
    assert sorted(joined.outcomes()) == [(0, FAILED, True), (1, DONE, True)]

"""The transport contract: bytes, completions, arrivals, permits, wakes, close."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from attrs import evolve

from pushkv.core.errors import TransportError
from pushkv.core.ids import FOREVER, Duration, seconds
from pushkv.model.faults import Fault, FaultRule
from pushkv.transport import (
    Arrival,
    Completion,
    Permit,
    Region,
    Transport,
    Write,
    WriteOutcome,
    load_transport,
)
from pushkv_memory import (
    CAPABILITIES,
    Landed,
    MemoryFabric,
    MemoryTransport,
    Posted,
    default_fabric,
)

from .two_engines import (
    BLOCK_BYTES,
    SIZE_BYTES,
    STRONG,
    WEAK,
    Bench,
    Engine,
    always,
    attempt,
    worker,
)


def test_bytes_land_exactly_and_are_told_once() -> None:
    bench = Bench()
    bench.post()
    assert bench.whole()
    assert list(bench.p.take()) == [Completion(attempt(), 0, WriteOutcome.DONE, 4 * BLOCK_BYTES)]
    assert list(bench.d.take()) == [Arrival(attempt(), 0, 77, 4 * BLOCK_BYTES)]
    assert list(bench.p.take()) == list(bench.d.take()) == []
    assert bench.fabric.in_flight == 0
    assert bench.fabric.next_due() == FOREVER


def test_the_history_names_every_copy() -> None:
    bench = Bench(pieces=3)
    bench.post(part=5, source=(0, 1), destination=(4, 2))
    assert isinstance(bench.fabric.history[0], Posted)
    assert bench.landed() == [
        (5, 4 * BLOCK_BYTES, 42),
        (5, 4 * BLOCK_BYTES + 42, 22),
        (5, 2 * BLOCK_BYTES, 21),
        (5, 2 * BLOCK_BYTES + 21, 43),
    ]


@pytest.mark.parametrize("pieces", [1, 2, 7, 4096])
def test_any_number_of_pieces_is_the_same_write(pieces: int) -> None:
    bench = Bench(pieces=pieces)
    bench.post()
    assert bench.whole()


def test_a_write_of_nothing_is_done() -> None:
    bench = Bench()
    bench.post(source=(), destination=())
    assert bench.p.outcomes == ["done"]
    assert bench.d.noticed == [0]
    assert bench.landed() == []


def test_many_writes_at_once() -> None:
    bench = Bench(always(Fault.DELAY, 1, 900), always(Fault.REORDERING))
    for part in range(1000):
        block = part % 60
        bench.post(part, source=(block,), destination=(block,))
    assert bench.fabric.in_flight == 1000
    assert bench.p.outcomes == []
    bench.drain()
    assert bench.p.outcomes == ["done"] * 1000
    assert sorted(each.part for each in bench.p.completions) == list(range(1000))
    assert sorted(bench.d.noticed) == list(range(1000))
    assert bench.d.bytes(0, 60 * BLOCK_BYTES) == bench.p.bytes(0, 60 * BLOCK_BYTES)
    assert bench.fabric.in_flight == 0


# -- permits


def test_no_permit_no_byte() -> None:
    bench = Bench()
    bench.permit.until_ns = bench.clock.now + 999
    bench.post()
    assert bench.p.outcomes == ["refused"]
    assert bench.landed() == []
    assert bench.d.noticed == []
    bench.permit.until_ns = bench.clock.now + 1000
    bench.post()
    assert bench.p.outcomes == ["refused", "done"]
    assert bench.whole()


def test_the_permit_is_checked_when_it_is_ready_not_when_it_is_ordered() -> None:
    bench, ready = Bench(), False
    bench.post(ready=lambda: ready)
    assert bench.landed() == []
    assert bench.fabric.next_due() == bench.clock.now + 1_000_000
    bench.permit.until_ns = 0
    ready = True
    bench.advance(1_000_000)
    assert bench.p.outcomes == ["refused"]
    assert bench.landed() == []


def test_the_permit_is_checked_against_the_workers_own_clock() -> None:
    bench = Bench()
    ahead = Engine(bench.fabric, worker("ahead"), lambda: bench.clock.now + 500)
    bench.meet(ahead, bench.d)
    bench.permit.until_ns = bench.clock.now + 1200
    for writer in (bench.p, ahead):
        write = Write(
            peer=bench.d.me,
            attempt=attempt(),
            part=0,
            arrival_token=0,
            source=writer.segments((0,)),
            destination=bench.d.segments((0,)),
            permit=bench.permit,
        )
        writer.transport.post(write)
    assert bench.p.outcomes == ["done"]
    assert ahead.outcomes == ["refused"]


def test_a_write_waits_for_its_source() -> None:
    bench, ready = Bench(), False
    bench.p.fill(bytes(SIZE_BYTES))
    bench.post(ready=lambda: ready)
    bench.advance(3_000_000)
    assert bench.p.outcomes == []
    bench.p.fill(b"\x07" * SIZE_BYTES)
    ready = True
    bench.advance(1_000_000)
    assert bench.p.outcomes == ["done"]
    assert bench.whole()


def test_a_write_whose_source_is_never_ready_ends_with_its_permit() -> None:
    bench = Bench()
    bench.permit.until_ns = bench.clock.now + 2_500_000
    bench.post(ready=lambda: False)
    bench.advance(1_000_000)
    assert bench.p.outcomes == []
    bench.advance(1_000_000)
    bench.advance(1_000_000)
    assert bench.p.outcomes == ["refused"]
    assert bench.fabric.next_due() == FOREVER
    assert bench.landed() == []


# -- what is wrong with a WRITE shows as its outcome


@pytest.mark.parametrize(
    ("side", "rows", "cause"),
    [
        ("source", [(-1, 64)] * 4, "source .* not registered"),
        ("destination", [(SIZE_BYTES - 63, 64)] * 4, "destination .* not registered"),
        ("destination", [(0, 64)] * 3, "4 source and 3 destination"),
        ("destination", [(0, 64)] * 3 + [(0, 65)], "differ in length"),
    ],
)
def test_segments_that_do_not_fit_fail(side: str, rows: list[tuple[int, int]], cause: str) -> None:
    bench = Bench()
    write = bench.write()
    base = bench.p.address if side == "source" else bench.d.address
    wrong = np.array([(base + offset, length) for offset, length in rows], dtype=np.uint64)
    source = wrong if side == "source" else write.source
    destination = wrong if side == "destination" else write.destination
    bench.p.transport.post(Write(bench.d.me, attempt(), 0, 0, source, destination, bench.permit))
    assert bench.p.outcomes == ["failed"]
    assert re.search(cause, bench.p.completions[0].cause)
    assert bench.landed() == []


def test_forgetting_a_peer_leaves_what_is_in_flight() -> None:
    bench = Bench(always(Fault.DELAY, 10, 20))
    bench.post()
    bench.p.transport.remove_peer(bench.d.me)
    bench.drain()
    assert bench.p.outcomes == ["done"]
    assert bench.whole()


def test_a_part_in_flight_is_not_posted_twice() -> None:
    bench = Bench(always(Fault.DELAY, 10, 20))
    bench.post()
    bench.post()
    assert bench.p.outcomes == ["failed"]
    assert "R10" in bench.p.completions[0].cause
    bench.drain()
    assert bench.p.outcomes == ["failed", "done"]


# -- arrivals


def test_arrivals_wait_for_who_does_not_look() -> None:
    bench = Bench()
    bench.d.transport.look_for_arrivals(False)
    bench.post()
    assert bench.d.noticed == []
    assert bench.d.woken == 0
    bench.d.transport.look_for_arrivals(True)
    bench.d.transport.look_for_arrivals(False)
    assert bench.d.woken == 1
    assert bench.d.noticed == [0]


def test_a_weak_transport_is_done_before_the_bytes_and_arrivals_follow_them() -> None:
    bench = Bench(always(Fault.DELAY, 10, 20), capabilities=WEAK)
    source = bench.p.bytes()
    bench.post()
    assert bench.p.outcomes == ["done"]
    assert bench.landed() == []
    bench.p.fill(b"x" * SIZE_BYTES)
    while bench.d.noticed == []:
        assert not bench.d.arrivals
        bench.advance(1)
    bench.p.fill(source)
    assert bench.whole()


def test_a_strong_transport_is_done_after_the_bytes() -> None:
    bench = Bench(always(Fault.DELAY, 10, 20))
    bench.post()
    while bench.p.outcomes == []:
        bench.advance(1)
        assert bench.whole() or not bench.p.completions
    assert bench.whole()


# -- wakes


def test_wake_is_called_for_news_and_only_then() -> None:
    bench = Bench(always(Fault.DELAY, 10, 10))
    bench.post()
    assert (bench.p.woken, bench.d.woken) == (0, 0)
    bench.advance(9)
    assert (bench.p.woken, bench.d.woken) == (0, 0)
    bench.advance(1)
    assert (bench.p.woken, bench.d.woken) == (1, 0)
    bench.advance(10)
    assert (bench.p.woken, bench.d.woken) == (1, 1)


def test_wake_is_called_without_the_lock() -> None:
    bench, seen = Bench(), []

    def wake() -> None:
        thread = threading.Thread(target=lambda: seen.append(bench.d.transport.poll()))
        thread.start()
        thread.join(10)

    other = MemoryTransport(bench.fabric)
    other.start(worker("o"), [Region(bench.p.address, SIZE_BYTES)], bench.clock, wake)
    other.add_peer(bench.d.me, bench.d.transport.memory())
    other.post(bench.write())
    assert len(seen) == 1


# -- start and close


def test_start_refuses_what_it_cannot_do() -> None:
    bench = Bench()
    with pytest.raises(TransportError, match="twice"):
        bench.p.transport.start(worker("p"), [], bench.clock, lambda: None)
    with pytest.raises(TransportError, match="device = 0"):
        MemoryTransport(bench.fabric).start(
            worker("x"), [Region(0, 1, device=0)], bench.clock, lambda: None
        )
    with pytest.raises(TransportError, match="still there"):
        Engine(bench.fabric, worker("d", 2), bench.clock)
    with pytest.raises(TransportError, match="not been started"):
        MemoryTransport(bench.fabric).post(bench.write())


def test_close_says_whether_writes_are_open() -> None:
    bench = Bench(always(Fault.DELAY, 10, 20))
    assert MemoryTransport(bench.fabric).close(0)
    bench.p.fill(b"s" * SIZE_BYTES)
    bench.post()
    assert not bench.p.transport.close(0)
    bench.p.fill(b"x" * SIZE_BYTES)
    bench.drain()
    assert bench.p.outcomes == ["done"]
    assert bench.p.woken == 0
    assert bench.d.bytes().count(b"s") == 4 * BLOCK_BYTES
    assert bench.p.transport.close(0)
    assert bench.d.transport.close(0)


def test_a_closed_transport_posts_nothing_and_still_answers() -> None:
    bench, ready = Bench(), False
    bench.post(0, ready=lambda: ready)
    assert not bench.p.transport.close(0)
    ready = True
    bench.post(1)
    bench.drain()
    assert bench.p.outcomes == ["failed", "failed"]
    assert bench.landed() == []


def test_nothing_lands_in_closed_memory() -> None:
    bench = Bench(always(Fault.DELAY, 10, 20))
    bench.post()
    assert bench.d.transport.close(0)
    bench.drain()
    assert bench.landed() == []
    assert bench.p.outcomes == ["unknown"]
    Engine(bench.fabric, worker("d", 2), bench.clock)


# -- real time and the entry point


def test_the_entry_point_gives_transports_of_one_fabric() -> None:
    transports = [load_transport("memory", {}) for _ in range(2)]
    assert [type(each) for each in transports] == [MemoryTransport, MemoryTransport]
    assert transports[0].memory() == transports[1].memory() == default_fabric().name
    fabric = MemoryFabric()
    own = load_transport("memory", {"fabric": fabric})
    assert own.memory() == fabric.name != default_fabric().name
    assert own.capabilities == fabric.capabilities
    assert own.version


def test_without_delay_real_time_needs_no_thread() -> None:
    fabric = MemoryFabric()
    writer = Engine(fabric, worker("p"), time.monotonic_ns)
    target = Engine(fabric, worker("d"), time.monotonic_ns)
    post_one(writer, target)
    assert writer.outcomes == ["done"]
    assert not timers()


def test_in_real_time_a_thread_completes_delayed_writes_and_ends() -> None:
    fabric = MemoryFabric(0, [always(Fault.DELAY, 20_000_000, 30_000_000)])
    writer = Engine(fabric, worker("p"), time.monotonic_ns)
    target = Engine(fabric, worker("d"), time.monotonic_ns)
    told = threading.Event()
    target.transport.look_for_arrivals(True)
    writer.fill(b"k" * BLOCK_BYTES)
    post_one(writer, target)
    assert writer.outcomes == []
    until = time.monotonic() + 30
    while not (writer.outcomes and target.noticed) and time.monotonic() < until:
        told.wait(0.005)
    assert writer.outcomes == ["done"]
    assert target.noticed == [0]
    assert target.bytes(0, BLOCK_BYTES) == b"k" * BLOCK_BYTES
    assert writer.woken == target.woken == 1
    while timers():
        assert time.monotonic() < until
        told.wait(0.005)
    post_one(writer, target, part=1)
    assert writer.transport.close(30)
    assert writer.outcomes == ["done", "done"]


def test_close_waits_no_longer_than_it_is_told() -> None:
    fabric = MemoryFabric(0, [always(Fault.DELAY, 200_000_000, 200_000_000)])
    writer = Engine(fabric, worker("p"), time.monotonic_ns)
    target = Engine(fabric, worker("d"), time.monotonic_ns)
    post_one(writer, target)
    assert not writer.transport.close(0.001)
    assert writer.transport.close(30)


def test_a_nearer_time_is_not_kept_waiting() -> None:
    far = FaultRule(Fault.DELAY, script=(0,), least=seconds(4), most=seconds(4))
    fabric = MemoryFabric(0, [far], evolve(CAPABILITIES, write_bound=None))
    writer = Engine(fabric, worker("p"), time.monotonic_ns)
    target = Engine(fabric, worker("d"), time.monotonic_ns)
    post_one(writer, target, part=0)
    time.sleep(0.05)
    answers = iter((False, False, True))
    post_one(writer, target, part=1, ready=lambda: next(answers))
    until = time.monotonic() + 30
    while not writer.outcomes and time.monotonic() < until:
        time.sleep(0.005)
    assert writer.outcomes == ["done"]
    assert {entry.part for entry in fabric.history if isinstance(entry, Landed)} == {1}


def test_in_real_time_no_byte_lands_after_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece is checked when it lands: a copy that is held up stops at the bound."""
    readings = count(0, 100)
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(readings))
    fabric = MemoryFabric(
        capabilities=evolve(CAPABILITIES, write_bound=Duration(1000)),
        clock=time.monotonic_ns,
        pieces=64,
    )
    writer = Engine(fabric, worker("p"), time.monotonic_ns)
    target = Engine(fabric, worker("d"), time.monotonic_ns)
    writer.fill(b"k" * BLOCK_BYTES)
    post_one(writer, target)
    assert writer.outcomes == ["failed"]
    assert writer.completions[0].cause == "the write bound passed"
    assert 0 < target.bytes().count(b"k") < 16


def timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pushkv-memory"]


def post_one(
    writer: Engine,
    target: Engine,
    part: int = 0,
    ready: Callable[[], bool] | None = None,
) -> None:
    permit = Permit()
    permit.until_ns = FOREVER
    writer.transport.add_peer(target.me, target.transport.memory())
    source, destination = writer.segments((0,)), target.segments((0,))
    write = Write(target.me, attempt(), part, 0, source, destination, permit, ready)
    writer.transport.post(write)


def test_it_is_a_transport() -> None:
    transport: Transport = MemoryTransport(MemoryFabric(capabilities=STRONG))
    assert transport.capabilities is STRONG

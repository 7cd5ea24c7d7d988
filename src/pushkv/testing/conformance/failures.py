"""Checks: WRITEs that cannot be made, must not be made, or must wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from attrs import evolve

from pushkv.transport import Completion, Permit, WriteOutcome

from .bench import BLOCK, PRODUCER, Bench, block
from .end import LARGE_AT, SMALL_AT, SMALL_BYTES, End, Order, segments

__all__ = ["CHECKS"]

_MEANT_FOR_LATER_NS = 50_000_000


def unknown_peer(bench: Bench) -> None:
    """A WRITE to a peer that was never added, or was removed, FAILS; one added again is known."""
    stranger = evolve(bench.order(block(0)), peer=PRODUCER)
    bench.outcome(WriteOutcome.FAILED, stranger)
    bench.producer.run(End.remove_peer, bench.consumer.worker)
    try:
        bench.outcome(WriteOutcome.FAILED, bench.order(block(0)))
        bench.nothing_arrives()
    finally:
        bench.meet(bench.producer, bench.consumer)
    bench.deliver([bench.order(block(0))])


def bad_peer_memory(bench: Bench) -> None:
    """Memory that is no good FAILS the WRITEs to that peer, until good memory comes."""
    good = bench.consumer.run(End.facts).memory
    middle = len(good) // 2
    flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    consumer = bench.consumer.worker
    bench.producer.run(End.remove_peer, consumer)
    try:
        for bad in (b"", b"hello", good[:-1], flipped, good + b"\x00"):
            bench.producer.run(End.add_peer, consumer, bad)
            bench.outcome(WriteOutcome.FAILED, bench.order(block(0)))
        bench.nothing_arrives()
    finally:
        bench.producer.run(End.add_peer, consumer, good)
    bench.deliver([bench.order(block(0))])


def outside_memory(bench: Bench) -> None:
    """A WRITE with one segment outside registered memory, at either side, FAILS as a whole."""
    outside = (
        (SMALL_AT + SMALL_BYTES - BLOCK + 1, BLOCK),
        (SMALL_AT - 1, BLOCK),
        (SMALL_AT + SMALL_BYTES + 8, 8),
        (SMALL_AT + SMALL_BYTES - 8, LARGE_AT - SMALL_AT - SMALL_BYTES + 16),
        (LARGE_AT + bench.large_bytes, 1),
    )
    orders = [
        bench.order([*block(0), row])
        for at, length in outside
        for row in ((at, SMALL_AT, length), (SMALL_AT, at, length))
    ]
    for address in (0, 8, 2**63, 2**64 - 8):
        for side in ("source", "destination"):
            order = bench.order([*block(0), (SMALL_AT, SMALL_AT, 16)])
            getattr(order, side)[1, 0] = address
            orders.append(order)
    bench.outcome(WriteOutcome.FAILED, *orders)
    bench.nothing_arrives()


def unequal_segments(bench: Bench) -> None:
    """Source and destination that differ in number or length of segments FAIL the WRITE."""
    there = bench.consumer.address + SMALL_AT
    orders = [
        evolve(bench.order([*block(0), *block(1)]), destination=segments(rows))
        for rows in ([], [(there, BLOCK)] * 3, [(there, BLOCK), (there, BLOCK + 1)])
    ]
    bench.outcome(WriteOutcome.FAILED, *orders)
    bench.nothing_arrives()


def permit_needed(bench: Bench) -> None:
    """Without a permit that lasts for the declared write bound, a WRITE is REFUSED."""
    bench.outcome(WriteOutcome.REFUSED, bench.order(block(0), permit_ns=-1))
    bound = bench.capabilities.write_bound
    if bound is not None:
        bench.outcome(WriteOutcome.REFUSED, bench.order(block(0), permit_ns=bound // 2))
    bench.nothing_arrives()


def permit_asked_when_ready(bench: Bench) -> None:
    """The permit that counts is the one at the post, not the one at the order."""
    order = bench.order(block(0))
    withdraw = bench.producer.run(_withdraw_then_ready, order, bench.limits.patience_s)
    bench.is_outcome(bench.match([order], withdraw)[order], WriteOutcome.REFUSED)
    bench.nothing_arrives()


def permit_asked_last(bench: Bench) -> None:
    """A permit that ends while `ready` is asked refuses the WRITE."""
    order = bench.order(block(0))
    found = bench.producer.run(_withdraw_in_ready, order, bench.limits.patience_s)
    bench.is_outcome(bench.match([order], found)[order], WriteOutcome.REFUSED)
    bench.nothing_arrives()


def permit_withdrawn_midway(bench: Bench) -> None:
    """A permit that ends while a large WRITE is posted: one outcome, and true to the bytes."""
    order = bench.order(
        [(LARGE_AT + at, LARGE_AT + at, BLOCK) for at in range(0, bench.large_bytes - BLOCK, BLOCK)]
    )
    found = bench.producer.begin(_withdraw_after, order, 0.003, bench.limits.patience_s)()
    completion = bench.match([order], found)[order]
    if completion.outcome is WriteOutcome.REFUSED:
        bench.nothing_arrives()
    elif completion.outcome is WriteOutcome.DONE:
        bench.arrived([order])
        bench.apply(order)
        bench.intact()
    else:
        arrived = bench.stray()
        bench.require(
            not arrived or bench.in_place(order, bench.consumer),
            "no arrival of a WRITE of which bytes are missing",
            arrived,
        )


def waits_for_its_source(bench: Bench) -> None:
    """Before `ready` nothing is written; then the source as it is by then."""
    order = bench.order(block(0), gate=1)
    bench.producer.run(End.post, [order])
    found = bench.producer.run(End.take_completions, 1, bench.limits.quiet_s)
    bench.require(not found, "no completion before the source is ready", found)
    bench.nothing_arrives()
    bench.producer.memory[SMALL_AT : SMALL_AT + BLOCK] ^= 0xFF
    try:
        bench.producer.run(End.open_gate, 1)
        bench.delivered([order])
    finally:
        bench.producer.memory[SMALL_AT : SMALL_AT + BLOCK] ^= 0xFF


def waiting_holds_up_nobody(bench: Bench) -> None:
    """WRITEs behind one whose source is not ready overtake it."""
    waiting = bench.order(block(0), gate=2)
    others = [bench.order(block(number)) for number in range(1, 5)]
    bench.producer.run(End.post, [waiting])
    try:
        bench.deliver(others)
    finally:
        bench.producer.run(End.open_gate, 2)
    bench.delivered([waiting])


def waiting_ends_with_the_permit(bench: Bench) -> None:
    """A WRITE whose source is never ready is REFUSED once its permit is over."""
    bound = bench.capabilities.write_bound or 0
    order = bench.order(block(0), gate=3, permit_ns=bound + _MEANT_FOR_LATER_NS)
    bench.outcome(WriteOutcome.REFUSED, order)
    bench.nothing_arrives()


def source_that_raises(bench: Bench) -> None:
    """A `ready` that raises FAILS its own WRITE."""
    orders = [bench.order(block(number)) for number in range(2)]
    found = bench.producer.run(_post_raising, orders, bench.limits.patience_s)
    outcomes = bench.match(orders, found)
    bench.is_outcome(outcomes[orders[0]], WriteOutcome.FAILED)
    bench.is_outcome(outcomes[orders[1]], WriteOutcome.DONE)
    bench.arrived(orders[1:])
    bench.apply(orders[1])
    bench.intact()


# -- in the producer's process


def _withdraw_then_ready(end: End, order: Order, timeout_s: float) -> list[Completion]:
    permit, ready = _lasting(), threading.Event()
    end.transport.post(end.build(order, permit, ready.is_set))
    time.sleep(0.01)
    end.poll()
    permit.until_ns = 0
    ready.set()
    return end.take_completions(1, timeout_s)


def _withdraw_in_ready(end: End, order: Order, timeout_s: float) -> list[Completion]:
    permit = _lasting()

    def ready() -> bool:
        permit.until_ns = 0
        return True

    end.transport.post(end.build(order, permit, ready))
    return end.take_completions(1, timeout_s)


def _withdraw_after(end: End, order: Order, delay_s: float, timeout_s: float) -> list[Completion]:
    permit = _lasting()

    def withdraw() -> None:
        permit.until_ns = 0

    timer = threading.Timer(delay_s, withdraw)
    timer.start()
    end.transport.post(end.build(order, permit))
    found = end.take_completions(1, timeout_s)
    timer.join()
    return found


def _post_raising(end: End, orders: list[Order], timeout_s: float) -> list[Completion]:
    def ready() -> bool:
        raise OSError("the device is gone")

    steps: tuple[Callable[[], bool] | None, ...] = (ready, None)
    for order, each in zip(orders, steps, strict=True):
        end.transport.post(end.build(order, ready=each))
    return end.take_completions(2, timeout_s)


def _lasting() -> Permit:
    permit = Permit()
    permit.until_ns = 2**62
    return permit


CHECKS = (
    unknown_peer,
    bad_peer_memory,
    outside_memory,
    unequal_segments,
    permit_needed,
    permit_asked_when_ready,
    permit_asked_last,
    permit_withdrawn_midway,
    waits_for_its_source,
    waiting_holds_up_nobody,
    waiting_ends_with_the_permit,
    source_that_raises,
)

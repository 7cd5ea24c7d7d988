"""Checks: bytes, completions and arrivals where nothing goes wrong."""

from __future__ import annotations

import random

from pushkv.transport import WriteOutcome

from .bench import BLOCK, Bench, Rows, block
from .end import LARGE_AT, SMALL_AT, SMALL_BYTES, End
from .report import NotApplicable

__all__ = ["CHECKS"]

_ROUNDS = 10
_BIG_BYTES = 1 << 20


def bytes_arrive(bench: Bench) -> None:
    """A WRITE of one segment is DONE, arrives, and puts its bytes in place."""
    bench.deliver([bench.order([(LARGE_AT + 8192, SMALL_AT + BLOCK, BLOCK)])])


def scattered_segments(bench: Bench) -> None:
    """A WRITE of thousands of segments, some of them empty, across regions is one WRITE."""
    bench.deliver([bench.order(_scatter(3000, bench.large_bytes))])


def misaligned_segments(bench: Bench) -> None:
    """Addresses and lengths need not be multiples of anything."""
    rows = [
        (SMALL_AT + 640 * n + n % 13, SMALL_AT + 512 * n + n % 11, 1 + n * 7 % 67)
        for n in range(300)
    ]
    bench.deliver([bench.order(rows)])


def large_segment(bench: Bench) -> None:
    """A segment of `large_bytes`, 64 MiB unless the ends say otherwise, is written whole."""
    bench.deliver([bench.order([(LARGE_AT, LARGE_AT, bench.large_bytes)])])


def empty_write(bench: Bench) -> None:
    """A WRITE of no bytes is DONE; whether it arrives is the transport's choice."""
    bench.deliver([bench.order([]), bench.order([(SMALL_AT, SMALL_AT, 0)] * 2)])


def nothing_outside_is_touched(bench: Bench) -> None:
    """First and last bytes of the regions are written, and not their neighbours."""
    edges = [
        (SMALL_AT, 1),
        (SMALL_AT + SMALL_BYTES - 1, 1),
        (LARGE_AT, 3),
        (LARGE_AT + bench.large_bytes - 5, 5),
    ]
    bench.deliver([bench.order([(at, at, length)]) for at, length in edges])


def arrival_after_bytes(bench: Bench) -> None:
    """When an arrival is told, all bytes of its part are visible to the one it is told to."""
    length = _BIG_BYTES // 64
    for number in range(_ROUNDS):
        bench.clear()
        at = SMALL_AT + BLOCK * number
        rows = [(at + n * length, at + n * length, length) for n in range(64)]
        order = bench.order(rows[::-1])
        bench.apply(order)
        seen = bench.consumer.begin(
            End.arrival_and_bytes, order.name, at, _BIG_BYTES, bench.limits.patience_s
        )
        bench.producer.run(End.post, [order])
        arrived, content = seen()
        bench.require(arrived, "an arrival", "none")
        bench.require(
            content == bench.image[at : at + _BIG_BYTES].tobytes(),
            "all bytes in place before the arrival is told",
            "bytes still to come",
        )
        found = bench.producer.run(End.take_completions, 1, bench.limits.patience_s)
        bench.is_outcome(bench.match([order], found)[order], WriteOutcome.DONE)


def arrival_names_the_part(bench: Bench) -> None:
    """An arrival names attempt, part and token in full, and its bytes."""
    orders = [
        bench.order([(SMALL_AT, SMALL_AT, 10)], part=0, token=0),
        bench.order([(SMALL_AT, SMALL_AT + 100, 20)], part=0, token=2**63 + 1),
        bench.order([(SMALL_AT, SMALL_AT + 200, 30)], part=2**32, token=0, transfer="ü" * 200),
        bench.order([(SMALL_AT, SMALL_AT + 300, 40)], part=7, token=9, transfer="same"),
        bench.order([(SMALL_AT, SMALL_AT + 400, 50)], part=8, token=9, transfer="same"),
    ]
    bench.producer.run(End.post, orders)
    found = bench.arrivals({order.name for order in orders})
    wanted = {order.name: order for order in orders}
    for each in found:
        bench.require(
            (each.attempt, each.part) in wanted, "the names of the WRITEs", f"{each} of none"
        )
        order = wanted.pop((each.attempt, each.part), None)
        if order is not None:
            bench.equal(each.token, order.token, "token")
            bench.equal(each.length_bytes, order.length_bytes, "length_bytes of an arrival")
    bench.require(not wanted, "an arrival of each WRITE", f"none of {list(wanted)}")
    bench.take(orders)


def done_means_visible(bench: Bench) -> None:
    """DONE comes when the bytes are visible at the consumer, if that is declared."""
    if not bench.capabilities.done_means_visible:
        raise NotApplicable("DONE is not declared to mean visible")
    for number in range(_ROUNDS):
        bench.clear()
        order = bench.order([(SMALL_AT + number, LARGE_AT + number, _BIG_BYTES)])
        bench.apply(order)
        bench.producer.run(End.post, [order])
        found = bench.producer.run(End.take_completions, 1, bench.limits.patience_s)
        bench.intact()
        bench.is_outcome(bench.match([order], found)[order], WriteOutcome.DONE)


def source_is_free_when_idle(bench: Bench) -> None:
    """Once a WRITE is over with `source_idle`, other content of the source is not written."""
    at = SMALL_AT
    order = bench.order([(at, at, _BIG_BYTES)])
    bench.apply(order)
    bench.producer.run(End.post, [order])
    found = bench.producer.run(End.take_completions, 1, bench.limits.patience_s)
    bench.producer.memory[at : at + _BIG_BYTES] ^= 0xFF
    try:
        bench.is_outcome(bench.match([order], found)[order], WriteOutcome.DONE)
        bench.arrived([order])
        bench.intact()
    finally:
        bench.producer.memory[at : at + _BIG_BYTES] ^= 0xFF


def one_completion_each(bench: Bench) -> None:
    """Each WRITE has one completion, whatever becomes of it; a bad one harms itself alone."""
    good, bad, refused = [], [], []
    for number in range(20):
        at = SMALL_AT + number * BLOCK
        good.append(bench.order([(at, at, BLOCK)]))
        bad.append(bench.order([(at, SMALL_AT - BLOCK, BLOCK)]))
        refused.append(bench.order([(at, at + (1 << 20), BLOCK)], permit_ns=-1))
    orders = [order for each in zip(good, bad, refused, strict=True) for order in each]
    bench.producer.run(End.post, orders)
    found = bench.take(orders)
    for group, outcome in (
        (good, WriteOutcome.DONE),
        (bad, WriteOutcome.FAILED),
        (refused, WriteOutcome.REFUSED),
    ):
        for order in group:
            bench.is_outcome(found[order], outcome)
    bench.arrived(good)
    for order in good:
        bench.apply(order)
    bench.intact()


def arrivals_wait(bench: Bench) -> None:
    """Arrivals that came while nobody looked are told once somebody does."""
    bench.consumer.run(End.look, False)
    orders = [bench.order([(SMALL_AT, SMALL_AT + n * BLOCK, BLOCK)]) for n in range(3)]
    bench.producer.run(End.post, orders)
    for completion in bench.take(orders).values():
        bench.is_outcome(completion, WriteOutcome.DONE)
    bench.consumer.run(End.look, True)
    bench.arrived(orders)


def looking_twice(bench: Bench) -> None:
    """To look, or to stop looking, again and again changes nothing."""
    for number, actives in enumerate(((True, True), (False, False, True), (True, False, True))):
        for active in actives:
            bench.consumer.run(End.look, active)
        bench.deliver([bench.order(block(number))])


def _scatter(count: int, large_bytes: int) -> Rows:
    """`count` segments of 0 to 1 KiB, shuffled, in places of both regions that do not overlap."""
    chance = random.Random(count)  # noqa: S311 - the same choice every time
    regions = (SMALL_AT, SMALL_BYTES), (LARGE_AT, large_bytes)
    places = [at + offset for at, size in regions for offset in range(0, size - 1024, 1024)]
    return [
        (chance.choice(places), to, chance.randrange(1024)) for to in chance.sample(places, count)
    ]


CHECKS = (
    bytes_arrive,
    scattered_segments,
    misaligned_segments,
    large_segment,
    empty_write,
    nothing_outside_is_touched,
    arrival_after_bytes,
    arrival_names_the_part,
    done_means_visible,
    source_is_free_when_idle,
    one_completion_each,
    arrivals_wait,
    looking_twice,
)

"""Checks: peers that are learned twice, forgotten, gone, or back under the same name."""

from __future__ import annotations

from pushkv.transport import WriteOutcome

from .bench import BLOCK, Bench, block
from .end import LARGE_AT, SMALL_AT, End
from .report import NotApplicable

__all__ = ["CHECKS"]


def same_peer_twice(bench: Bench) -> None:
    """To learn a peer again, with the same memory, changes nothing, not even for open WRITEs."""
    memory = bench.consumer.run(End.facts).memory
    orders = [bench.order(block(number)) for number in range(8)]
    for order in orders:
        bench.producer.run(End.add_peer, bench.consumer.worker, memory)
        bench.producer.run(End.post, [order])
        bench.producer.run(End.add_peer, bench.consumer.worker, memory)
    bench.delivered(orders)


def removed_peer(bench: Bench) -> None:
    """WRITEs to a peer that are open when it is removed are still told, exactly once each."""
    orders = bench.barrage(bench.consumer)
    bench.producer.run(End.post, orders)
    bench.producer.run(End.remove_peer, bench.consumer.worker)
    bench.producer.run(End.remove_peer, bench.consumer.worker)
    try:
        found = bench.take(orders)
    finally:
        bench.meet(bench.producer, bench.consumer)
    bench.is_true(orders, found)
    bench.clear()
    bench.deliver([bench.order(block(0))])


def consumer_crashes(bench: Bench) -> None:
    """A peer that dies while it is written to: each WRITE has one outcome, DONE if it is true."""
    _needs_crashes(bench)
    victim, orders = bench.victim()
    found = bench.take(orders)
    visible = bench.capabilities.done_means_visible
    for order in orders:
        bench.require(
            found[order].outcome is not WriteOutcome.DONE
            or not visible
            or bench.in_place(order, victim),
            "DONE of a peer that crashed only where all bytes are in place",
            f"DONE of part {order.part}, and bytes are missing",
        )


def writes_to_the_dead_end(bench: Bench) -> None:
    """WRITEs to a peer that is dead are told too, and hold up none to others."""
    _needs_crashes(bench)
    victim, before = bench.victim()
    bench.take(before)
    orders = [bench.order(block(number), target=victim) for number in range(3)]
    others = [bench.order(block(number)) for number in range(3)]
    together = [order for pair in zip(orders, others, strict=True) for order in pair]
    bench.producer.run(End.post, together)
    found = bench.take(together)
    for order in orders:
        bench.require(
            found[order].outcome is not WriteOutcome.DONE
            or not bench.capabilities.done_means_visible,
            "another outcome than DONE from a dead peer",
            "DONE",
        )
    for order in others:
        bench.is_outcome(found[order], WriteOutcome.DONE)
        bench.apply(order)
    bench.arrived(others)
    bench.intact()


def successor_is_reached(bench: Bench) -> None:
    """A peer that is back under its old name, as another incarnation, is written to."""
    _needs_crashes(bench)
    successor = bench.successor()
    successor.run(End.look, True)
    order = bench.order([(LARGE_AT, SMALL_AT, BLOCK)], target=successor)
    bench.outcome(WriteOutcome.DONE, order)
    arrived = bench.arrivals({order.name}, successor)
    bench.require(
        [(each.attempt, each.part) for each in arrived] == [order.name],
        f"one arrival, of {order.name}",
        arrived,
    )
    bench.require(bench.in_place(order, successor), "all bytes in place", "some are missing")


def predecessor_stays_dead(bench: Bench) -> None:
    """WRITEs aimed at a dead incarnation do not reach its successor, if that is declared."""
    _needs_crashes(bench)
    if bench.capabilities.reaches_successor:
        raise NotApplicable("WRITEs are declared to reach a successor")
    successor = bench.successor()
    victim, _ = bench.victim()
    successor.memory[:] = bench.wiped
    successor.run(End.look, True)
    bench.stray(0.0, successor)
    orders = bench.barrage(victim)
    bench.producer.run(End.post, orders)
    for completion in bench.take(orders).values():
        bench.require(
            completion.outcome is not WriteOutcome.DONE
            or not bench.capabilities.done_means_visible,
            "another outcome than DONE from a dead incarnation",
            "DONE",
        )
    arrived = bench.stray(end=successor)
    bench.require(not arrived, "no arrival at the successor", arrived)
    bench.untouched(successor)


def producer_crashes(bench: Bench) -> None:
    """A writer that dies leaves arrivals of whole parts only; its next life writes at once."""
    _needs_crashes(bench)
    writer = bench.another("writer")
    bench.fill(writer, seed=2)
    bench.meet(writer, bench.consumer)
    orders = bench.barrage(bench.consumer, writer)
    writer.run(End.post, orders)
    bench.await_first_byte(bench.consumer, orders[0])
    writer.crash()
    names = {order.name: order for order in orders}
    for each in bench.stray(2 * bench.limits.quiet_s):
        order = names.get((each.attempt, each.part))
        bench.require(order is not None, "arrivals of WRITEs that were posted", each)
        assert order is not None
        bench.require(
            bench.in_place(order, bench.consumer, writer),
            "arrivals of whole parts only",
            f"one of part {order.part}, and bytes are missing",
        )
    successor = bench.another("writer", writer)
    bench.fill(successor, seed=3)
    bench.meet(successor, bench.consumer)
    order = bench.order([(LARGE_AT, LARGE_AT + bench.large_bytes - BLOCK, BLOCK)], writer=successor)
    successor.run(End.post, [order])
    bench.is_outcome(bench.take([order], successor)[order], WriteOutcome.DONE)
    bench.arrivals({order.name})
    bench.require(
        bench.in_place(order, bench.consumer, successor), "all bytes in place", "some are missing"
    )


def _needs_crashes(bench: Bench) -> None:
    if not bench.ends.can_crash:
        raise NotApplicable("these ends cannot crash")


CHECKS = (
    same_peer_twice,
    removed_peer,
    consumer_crashes,
    writes_to_the_dead_end,
    successor_is_reached,
    predecessor_stays_dead,
    producer_crashes,
)

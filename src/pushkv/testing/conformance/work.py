"""Checks: load, threads, and what is held and used."""

from __future__ import annotations

from .bench import BLOCK, Bench, block
from .end import SMALL_AT, End, Name, Order, Usage
from .ends import EndHandle
from .report import NotApplicable

__all__ = ["CHECKS", "expect_no_more"]

_MANY = 5000
_SMALL_BYTES = 64
_WOKEN = 100
_TRANSFERS = 200


def many_small_writes(bench: Bench) -> None:
    """Thousands of WRITEs may be posted before the first is over; all are told."""
    at = [SMALL_AT + number * _SMALL_BYTES for number in range(_MANY)]
    bench.deliver([bench.order([(each, each, _SMALL_BYTES)]) for each in at])


def calls_return(bench: Bench) -> None:
    """Every call returns soon, whatever is open, not ready or not there to tell."""
    waiting = bench.order(block(100), gate=100)
    orders = [waiting, *bench.barrage(bench.consumer)]
    memory = bench.consumer.run(End.facts).memory
    bench.producer.run(End.take_slowest)
    bench.producer.run(End.post, orders)
    bench.producer.run(End.add_peer, bench.consumer.worker, memory)
    bench.producer.run(End.look, True)
    bench.producer.run(End.poll)
    bench.producer.run(End.look, False)
    bench.producer.run(End.open_gate, 100)
    bench.delivered(orders)
    _expect_quick(bench)


def calls_wait_for_no_peer(bench: Bench) -> None:
    """While a peer stands still, no call waits for it; when it goes on, all WRITEs are told."""
    if not bench.ends.can_pause:
        raise NotApplicable("these ends cannot be stopped")
    consumer = bench.consumer
    memory = consumer.run(End.facts).memory
    orders = bench.barrage(consumer)
    bench.producer.run(End.take_slowest)
    consumer.pause()
    try:
        bench.producer.run(End.post, orders)
        bench.producer.run(End.add_peer, consumer.worker, memory)
        found = bench.producer.run(End.take_completions, len(orders), bench.limits.quiet_s)
        _expect_quick(bench)
    finally:
        consumer.resume()
    left = len(orders) - len(found)
    found += bench.producer.run(End.take_completions, left, bench.limits.patience_s)
    bench.is_true(orders, bench.match(orders, found))


def wake_wakes(bench: Bench) -> None:
    """Whoever sleeps until `wake` is called misses no completion and no arrival."""
    orders = [bench.order(block(number)) for number in range(_WOKEN)]
    patience_s = bench.limits.patience_s
    bench.consumer.run(_be_current)
    bench.producer.run(_be_current)
    arrivals = bench.consumer.begin(
        _sleep_for_arrivals, {order.name for order in orders}, patience_s
    )
    missing = bench.producer.run(_sleep_for_completions, orders, patience_s)
    never_arrived = arrivals()
    bench.require(not missing, "a wake for each completion", f"none for {missing} of them")
    bench.require(not never_arrived, "a wake for arrivals", f"{never_arrived} were slept through")
    bench.take(orders)
    bench.arrived(orders)


def idle_costs_nothing(bench: Bench) -> None:
    """With nothing open and nobody looking for arrivals, the process sleeps."""
    bench.deliver([bench.order(block(0))])
    bench.consumer.run(End.look, False)
    watched = [each.begin(End.cpu_share, bench.limits.idle_s) for each in bench.pair()]
    for share in [each() for each in watched]:
        bench.require(
            share <= bench.limits.idle_share,
            f"at most {bench.limits.idle_share:.0%} of a core while idle",
            f"{share:.0%}",
        )


def transfers_leak_nothing(bench: Bench) -> None:
    """Hundreds of transfers leave no thread and no file descriptor behind."""
    rows = [(SMALL_AT + n * 2 * BLOCK, SMALL_AT + n * 3 * BLOCK, BLOCK) for n in range(16)]
    bench.deliver([bench.order(rows) for _ in range(2)])
    before = [each.run(End.usage) for each in bench.pair()]
    for _ in range(_TRANSFERS // 20):
        bench.deliver([bench.order(rows) for _ in range(20)])
    for end, usage in zip(bench.pair(), before, strict=True):
        expect_no_more(bench, end, usage)


def expect_no_more(bench: Bench, end: EndHandle, before: Usage) -> None:
    """Soon the end's process holds no more than before."""

    def more() -> bool:
        now = end.run(End.usage)
        return now.threads > before.threads or now.descriptors > before.descriptors

    bench.until(
        lambda: not more(),
        f"no more than before, {before}",
        lambda: f"{end.run(End.usage)} at {end.worker.engine}",
    )


def _expect_quick(bench: Bench) -> None:
    name, taken_s = bench.producer.run(End.take_slowest)
    limit_s = bench.limits.call_s
    bench.require(taken_s <= limit_s, f"calls of at most {limit_s} s", f"{name}: {taken_s:.3f} s")


# -- in the ends' processes


def _be_current(end: End) -> None:
    end.news.clear()
    end.poll()
    end.completions.clear()
    end.arrivals.clear()


def _sleep_for_completions(end: End, orders: list[Order], patience_s: float) -> int:
    """Post one after another and sleep until each is over; how many never woke us."""
    for number, order in enumerate(orders):
        end.post([order])
        while len(end.completions) <= number:
            if not end.news.wait(patience_s):
                return len(orders) - number
            end.news.clear()
            end.poll()
    return 0


def _sleep_for_arrivals(end: End, names: set[Name], patience_s: float) -> int:
    """Sleep until these parts have arrived; how many never woke us."""
    while missing := names - {(each.attempt, each.part) for each in end.arrivals}:
        if not end.news.wait(patience_s):
            return len(missing)
        end.news.clear()
        end.poll()
    return 0


CHECKS = (
    many_small_writes,
    calls_return,
    calls_wait_for_no_peer,
    wake_wakes,
    idle_costs_nothing,
    transfers_leak_nothing,
)

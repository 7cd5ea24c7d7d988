"""Checks: what a transport says of itself, its beginning and its end."""

from __future__ import annotations

import time
from collections.abc import Callable

from attrs import frozen

from pushkv.core.errors import TransportError
from pushkv.core.ids import Worker
from pushkv.transport import Completion, WriteOutcome

from .bench import Bench, block
from .end import End, Order
from .report import NotApplicable
from .work import expect_no_more

__all__ = ["CHECKS"]

_MEMORY_BYTES_MAX = 16 << 20
_LIVES = 3
_AT_ONCE_S = 0.1


def facts_are_constant(bench: Bench) -> None:
    """Version, capabilities and memory description are plausible and never change."""
    before = bench.producer.run(End.facts)
    bench.deliver([bench.order(block(0))])
    bench.equal(bench.producer.run(End.facts), before, "facts after a WRITE")
    bench.equal(bench.consumer.run(End.facts).version, before.version, "the peer's version")
    bench.equal(
        bench.consumer.run(End.facts).capabilities, before.capabilities, "the peer's capabilities"
    )
    bench.require(bool(before.version), "a version", repr(before.version))
    bench.require(
        0 < len(before.memory) <= _MEMORY_BYTES_MAX,
        f"1 to {_MEMORY_BYTES_MAX} bytes of memory description",
        f"{len(before.memory)} bytes",
    )
    declared = before.capabilities
    bench.require(bool(declared.name), "a name", repr(declared.name))
    for name in ("write_bound", "death_bound"):
        bound = getattr(declared, name)
        bench.require(
            bound is None or (type(bound) is int and bound > 0),
            f"{name} of more than 0 ns, or None",
            repr(bound),
        )


def misuse_is_an_error(bench: Bench) -> None:
    """Calls before `start`, and a second `start`, raise TransportError."""
    for what, error in bench.producer.run(_misuse, bench.order(block(0))):
        bench.equal(error, "TransportError", what)


def close_before_start(bench: Bench) -> None:
    """To close what was never started is no error, and true."""
    bench.equal(bench.producer.run(_close_unstarted), True, "close")


def close_tells_the_rest(bench: Bench) -> None:
    """`poll` after `close` gives what is left, one completion for each WRITE."""
    orders = bench.barrage(bench.consumer)
    life = _live(bench, orders, close_s=bench.limits.patience_s, ask_first=False)
    bench.equal(life.closed, True, "close with time enough")
    bench.is_true(orders, bench.match(orders, life.after))


def close_ends_what_waits(bench: Bench) -> None:
    """A WRITE whose source is never ready does not outlive `close`, and is not posted."""
    order = bench.order(block(0), gate=200)
    life = _live(bench, [order], close_s=bench.limits.patience_s, ask_first=False)
    bench.equal(life.closed, True, "close with time enough")
    bench.is_outcome(bench.match([order], life.after)[order], WriteOutcome.FAILED)
    bench.nothing_arrives()


def close_is_honest(bench: Bench) -> None:
    """`close` returns True only if every WRITE has ended, and may be called again."""
    if not bench.ends.can_pause:
        raise NotApplicable("these ends cannot be stopped")
    orders = bench.barrage(bench.consumer)
    memory = bench.consumer.run(End.facts).memory
    assert bench.consumer.address
    bench.producer.run(_sibling_meets, bench.consumer.worker, memory)
    bench.consumer.pause()
    try:
        closed, found = bench.producer.run(_close_in_haste, orders)
        if closed:
            outcomes = bench.match(orders, found)
            for order in orders:
                bench.require(
                    outcomes[order].source_idle, "source_idle, as close said", outcomes[order]
                )
    finally:
        bench.consumer.resume()
    again, more = bench.producer.run(
        _close_again, len(orders) - len(found), bench.limits.patience_s
    )
    bench.equal(again, True, "close again, with time enough")
    bench.match(orders, found + more)


def closed_for_good(bench: Bench) -> None:
    """After `close` a WRITE FAILS, and `close` is True again."""
    orders = [bench.order(block(0)), bench.order(block(1))]
    late, again = bench.producer.run(
        _post_after_close, orders, bench.consumer.run(End.facts).memory, bench.limits.patience_s
    )
    bench.equal(again, True, "close again")
    outcomes = bench.match(orders, late)
    bench.is_outcome(outcomes[orders[0]], WriteOutcome.DONE)
    bench.is_outcome(outcomes[orders[1]], WriteOutcome.FAILED)
    bench.arrived(orders[:1])
    bench.apply(orders[0])
    bench.intact()


def lives_leave_nothing(bench: Bench) -> None:
    """A transport that is closed leaves no thread and no file descriptor behind."""
    before = None
    for number in range(1 + _LIVES):
        if number == 1:  # the first may load what stays for the process
            before = bench.producer.run(End.usage)
        order = bench.order(block(number))
        life = _live(bench, [order], close_s=bench.limits.patience_s, ask_first=True)
        bench.is_outcome(bench.match([order], life.before)[order], WriteOutcome.DONE)
        bench.equal(life.closed, True, "close with nothing open")
        bench.match([], life.after)
    assert before is not None
    expect_no_more(bench, bench.producer, before)


@frozen
class _Life:
    """A transport's life: completions before `close`, its answer, and completions after."""

    before: list[Completion]
    closed: bool
    after: list[Completion]


def _live(bench: Bench, orders: list[Order], *, close_s: float, ask_first: bool) -> _Life:
    return bench.producer.run(
        _one_life,
        orders,
        bench.consumer.run(End.facts).memory,
        close_s,
        bench.limits.patience_s if ask_first else 0.0,
    )


# -- in the producer's process


def _one_life(
    end: End, orders: list[Order], memory: bytes, close_s: float, patience_s: float
) -> _Life:
    sibling = end.sibling()
    sibling.add_peer(orders[0].peer, memory)
    sibling.post(orders)
    before = sibling.take_completions(len(orders), patience_s) if patience_s else []
    closed = sibling.transport.close(close_s)
    return _Life(before, closed, sibling.take_completions(len(orders) - len(before), _AT_ONCE_S))


def _sibling_meets(end: End, peer: Worker, memory: bytes) -> None:
    end.kept = end.sibling()
    end.kept.add_peer(peer, memory)


def _close_in_haste(end: End, orders: list[Order]) -> tuple[bool, list[Completion]]:
    assert end.kept is not None
    end.kept.post(orders)
    time.sleep(0.01)
    closed = end.kept.transport.close(0.05)
    return closed, end.kept.take_completions(len(orders), _AT_ONCE_S)


def _close_again(end: End, count: int, patience_s: float) -> tuple[bool, list[Completion]]:
    assert end.kept is not None
    closed = end.kept.transport.close(patience_s)
    found = end.kept.take_completions(count + 1, _AT_ONCE_S)
    end.kept = None
    return closed, found


def _post_after_close(
    end: End, orders: list[Order], memory: bytes, patience_s: float
) -> tuple[list[Completion], bool]:
    sibling = end.sibling()
    sibling.add_peer(orders[0].peer, memory)
    sibling.post(orders[:1])
    found = sibling.take_completions(1, patience_s)
    sibling.transport.close(patience_s)
    sibling.post(orders[1:])
    found += sibling.take_completions(1, patience_s)
    return found, sibling.transport.close(patience_s)


def _close_unstarted(end: End) -> bool:
    return end.factory().close(0.0)


def _misuse(end: End, order: Order) -> list[tuple[str, str]]:
    fresh = end.factory()
    calls: dict[str, Callable[[], None]] = {
        "start again": lambda: end.transport.start(end.worker, [], time.monotonic_ns, end.news.set),
        "post before start": lambda: fresh.post(end.build(order)),
        "add_peer before start": lambda: fresh.add_peer(order.peer, b""),
    }
    found = []
    for what, call in calls.items():
        try:
            call()
            found.append((what, "nothing"))
        except TransportError:
            found.append((what, "TransportError"))
        except Exception as error:  # noqa: BLE001 - shown to the caller
            found.append((what, repr(error)))
    return found


CHECKS = (
    facts_are_constant,
    misuse_is_an_error,
    close_before_start,
    close_tells_the_rest,
    close_ends_what_waits,
    close_is_honest,
    closed_for_good,
    lives_leave_nothing,
)

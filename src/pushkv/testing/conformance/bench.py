"""What the checks share: two standing ends, orders between them, and what must come of those."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count

import numpy as np
from attrs import frozen

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import AttemptId, EngineId, Incarnation, TransferId, Worker
from pushkv.transport import Arrival, Completion, WriteOutcome

from .end import LARGE_AT, SMALL_AT, Bytes, End, Name, Order, memory_bytes, segments
from .ends import EndHandle, TransportEnds
from .report import ConformanceError

__all__ = ["BLOCK", "CONSUMER", "PRODUCER", "Bench", "Limits", "Rows", "block"]

BLOCK = 4096
CONSUMER = Worker(EngineId("consumer"), Incarnation(2**64 - 2), 3)
PRODUCER = Worker(EngineId("producer"), Incarnation(1), 1)

_PATTERN_BYTES = 1_000_003  # a prime, so that no two blocks are alike

Rows = Sequence[tuple[int, int, int]]
"""(offset in the source, offset in the destination, length) of each segment."""


def block(number: int) -> list[tuple[int, int, int]]:
    """The rows of a WRITE of one block, number by number without overlap."""
    at = SMALL_AT + number * BLOCK
    return [(at, at, BLOCK)]


@frozen
class Limits:
    """How patient the checks are. Times in seconds.

    Attributes:
        patience_s: How long something that must come may take.
        quiet_s: How long to look for something that must not come.
        call_s: How long a call that does not block may take, on a busy machine.
        idle_s: For how long the idle ends are watched.
        idle_share: The share of a core that a process with idle ends may use.
    """

    patience_s: float = 10.0
    quiet_s: float = 0.05
    call_s: float = 1.0
    idle_s: float = 1.0
    idle_share: float = 0.1


class Bench:
    """Two ends that know each other, opened when first used, and a record of what is posted.

    Attributes:
        check: The check that is running; errors name it.
        image: What the consumer's memory must look like.
        large_bytes: Length of the larger region of each end.
        wiped: Every byte of wiped memory.
    """

    wiped = 0xEE

    def __init__(self, ends: TransportEnds, limits: Limits) -> None:
        self.ends = ends
        self.limits = limits
        self.check = ""
        self.large_bytes: int = ends.large_bytes
        self.image: Bytes = np.full(memory_bytes(self.large_bytes), self.wiped, np.uint8)
        self._pair: tuple[EndHandle, EndHandle] | None = None
        self._dead: EndHandle | None = None
        self._successor: EndHandle | None = None
        self._to_victim: list[Order] = []
        self._arrived: set[Name] = set()
        self._numbers = count(1)
        self._names = count(1)

    # -- ends

    def pair(self) -> tuple[EndHandle, EndHandle]:
        """The standing ends."""
        if self._pair is None:
            producer, consumer = self.ends.open(PRODUCER), self.ends.open(CONSUMER)
            self.fill(producer)
            self.meet(producer, consumer)
            self._pair = producer, consumer
        return self._pair

    @property
    def producer(self) -> EndHandle:
        """The standing end that writes."""
        return self.pair()[0]

    @property
    def consumer(self) -> EndHandle:
        """The standing end that is written to."""
        return self.pair()[1]

    @property
    def capabilities(self) -> Capabilities:
        """What the transport declares."""
        return self.producer.run(End.facts).capabilities

    def begin(self) -> None:
        """Begin a check: nothing is written, nothing is untold, arrivals are looked for."""
        self.producer.run(End.take_completions, 0, 0.0)
        self.consumer.run(End.look, True)
        self.stray(0.0)
        self.clear()

    def clear(self) -> None:
        """Wipe the consumer's memory."""
        self.image[:] = self.wiped
        self.consumer.memory[:] = self.wiped

    def fill(self, end: EndHandle, seed: int = 1) -> None:
        """Give an end bytes to write, none of them like those of wiped memory."""
        content = np.random.default_rng(seed).integers(0, self.wiped, _PATTERN_BYTES, np.uint8)
        size = len(end.memory)
        whole = size // _PATTERN_BYTES * _PATTERN_BYTES
        end.memory[:whole].reshape(-1, _PATTERN_BYTES)[:] = content
        end.memory[whole:] = content[: size - whole]

    def meet(self, one: EndHandle, other: EndHandle) -> None:
        """Tell each of two ends about the other."""
        memories = one.run(End.facts).memory, other.run(End.facts).memory
        one.run(End.add_peer, other.worker, memories[1])
        other.run(End.add_peer, one.worker, memories[0])

    def another(self, engine: str, predecessor: EndHandle | None = None) -> EndHandle:
        """An end with wiped memory that nobody knows yet, or the successor of one that crashed."""
        worker = Worker(EngineId(engine), Incarnation(100 + next(self._names)), 0)
        end = self.ends.open(worker, predecessor)
        end.memory[:] = self.wiped
        return end

    def victim(self) -> tuple[EndHandle, list[Order]]:
        """A consumer that crashed while the producer wrote to it, and those WRITEs.

        They are given once, to whoever asks first; nobody has seen their completions then.
        """
        if self._dead is None:
            victim = self.another("victim")
            self.meet(self.producer, victim)
            self._to_victim = self.barrage(victim)
            self.producer.run(End.post, self._to_victim)
            self.await_first_byte(victim, self._to_victim[0])
            victim.crash()
            self._dead = victim
        orders, self._to_victim = self._to_victim, []
        return self._dead, orders

    def successor(self) -> EndHandle:
        """The next incarnation of the consumer that crashed, known to the producer."""
        victim, orders = self.victim()
        if self._successor is None:
            self.take(orders)
            self._successor = self.another("victim", victim)
            self.meet(self.producer, self._successor)
        return self._successor

    def barrage(self, target: EndHandle, writer: EndHandle | None = None) -> list[Order]:
        """One large WRITE and some small ones behind it."""
        rows = [[(LARGE_AT, LARGE_AT, self.large_bytes)]]
        rows += [[(at, at, BLOCK)] for at in range(SMALL_AT, SMALL_AT + 16 * BLOCK, BLOCK)]
        return [self.order(each, target=target, writer=writer) for each in rows]

    def await_first_byte(self, target: EndHandle, order: Order) -> None:
        """Until the first byte of an order is in place, or a moment has passed."""
        at = int(order.destination[0, 0]) - target.address
        until = time.monotonic() + 20 * self.limits.quiet_s
        while target.memory[at] == self.wiped and time.monotonic() < until:
            time.sleep(0)

    # -- orders

    def order(
        self,
        rows: Rows,
        *,
        target: EndHandle | None = None,
        writer: EndHandle | None = None,
        permit_ns: int | None = None,
        gate: int | None = None,
        part: int | None = None,
        token: int | None = None,
        transfer: str = "",
    ) -> Order:
        """A WRITE of `rows`, offsets in the memories of the two ends, under a name of its own."""
        target = self.consumer if target is None else target
        writer = self.producer if writer is None else writer
        number = next(self._numbers)
        return Order(
            target.worker,
            AttemptId(
                target.worker.engine,
                target.worker.incarnation,
                target.worker.rank,
                writer.worker.rank,
                TransferId(transfer or f"transfer-{number}"),
                number,
            ),
            number + 1000 if part is None else part,
            number + 2000 if token is None else token,
            segments([((writer.address + source) % 2**64, length) for source, _, length in rows]),
            segments([((target.address + to) % 2**64, length) for _, to, length in rows]),
            permit_ns,
            gate,
        )

    def apply(self, order: Order) -> None:
        """Let the image show what an order to the consumer writes."""
        ours, theirs = self.producer.address, self.consumer.address
        pairs = zip(order.source.tolist(), order.destination.tolist(), strict=True)
        for (source, length), (to, _) in pairs:
            content = self.producer.memory[source - ours : source - ours + length]
            self.image[to - theirs : to - theirs + length] = content

    def take(
        self, orders: Sequence[Order], writer: EndHandle | None = None
    ) -> dict[Order, Completion]:
        """The completion of each order. One too many shows when the check ends, at the latest."""
        writer = self.producer if writer is None else writer
        if not orders:
            return {}
        found = writer.run(End.take_completions, len(orders), self.limits.patience_s)
        return self.match(orders, found)

    def match(self, orders: Sequence[Order], found: list[Completion]) -> dict[Order, Completion]:
        """Each order with its completion out of `found`; there must be one each and no other."""
        told = Counter((each.attempt, each.part) for each in found)
        wanted = {order.name: order for order in orders}
        for name in told.keys() - wanted.keys():
            self.require(False, "completions of WRITEs that were posted", f"one of {name}")
        for name in wanted:
            if told[name] != 1:
                self.require(
                    False, "exactly one completion for each WRITE", f"{told[name]} of {name}"
                )
        for each in found:
            self._check_completion(wanted[each.attempt, each.part], each)
        return {wanted[each.attempt, each.part]: each for each in found}

    def _check_completion(self, order: Order, found: Completion) -> None:
        if found.outcome is WriteOutcome.DONE:
            self.equal(found.length_bytes, order.length_bytes, "length_bytes of a WRITE DONE")
        else:
            self.require(bool(found.cause), f"a cause with {found.outcome.name}", "none")
        if found.outcome is not WriteOutcome.UNKNOWN:
            self.require(
                found.source_idle, f"source_idle with {found.outcome.name}", "source_idle = False"
            )

    def outcome(self, wanted: WriteOutcome, *orders: Order) -> None:
        """Post orders; the outcome of each must be `wanted`."""
        self.producer.run(End.post, list(orders))
        for completion in self.take(orders).values():
            self.is_outcome(completion, wanted)

    def is_outcome(self, completion: Completion, wanted: WriteOutcome) -> None:
        """The outcome must be `wanted`."""
        self.require(
            completion.outcome is wanted,
            f"outcome {wanted.name}",
            f"{completion.outcome.name} {completion.cause!r}".rstrip(),
        )

    def deliver(self, orders: Sequence[Order]) -> None:
        """Post orders to the consumer; all are DONE, all arrive, and nothing else is written."""
        self.producer.run(End.post, list(orders))
        self.delivered(orders)

    def delivered(self, orders: Sequence[Order]) -> None:
        """Orders to the consumer that were posted: all are DONE, all arrive, nothing else does."""
        for completion in self.take(orders).values():
            self.is_outcome(completion, WriteOutcome.DONE)
        self.arrived(orders)
        for order in orders:
            self.apply(order)
        self.intact()

    def arrived(self, orders: Sequence[Order]) -> None:
        """Each order that has bytes arrives, and nothing else."""
        must = {order.name for order in orders if order.length_bytes}
        names = {(each.attempt, each.part) for each in self.arrivals(must)}
        for name in names - {order.name for order in orders}:
            self.require(False, "arrivals of WRITEs that were posted", f"one of {name}")
        for name in must - names:
            self.require(False, "an arrival of each WRITE", f"none of {name}")

    def arrivals(self, names: Collection[Name], end: EndHandle | None = None) -> list[Arrival]:
        """What arrives until all `names` have, or time is up. Repeats are left out."""
        end = self.consumer if end is None else end
        missing, found = set(names), list[Arrival]()
        until = time.monotonic() + self.limits.patience_s
        while missing and (left_s := until - time.monotonic()) > 0:
            found += self._first_time(end.run(End.take_arrivals, len(missing), left_s))
            missing -= {(each.attempt, each.part) for each in found}
        return found

    def stray(self, quiet_s: float | None = None, end: EndHandle | None = None) -> list[Arrival]:
        """What arrives within a moment, repeats left out."""
        end = self.consumer if end is None else end
        quiet_s = self.limits.quiet_s if quiet_s is None else quiet_s
        return self._first_time(end.run(End.take_arrivals, 1, quiet_s))

    def _first_time(self, found: list[Arrival]) -> list[Arrival]:
        """Arrivals of parts that have not arrived before: an arrival may repeat."""
        fresh = {(each.attempt, each.part): each for each in found}
        fresh = {name: each for name, each in fresh.items() if name not in self._arrived}
        self._arrived |= fresh.keys()
        return list(fresh.values())

    def nothing_arrives(self) -> None:
        """No arrival comes, and no byte."""
        found = self.stray()
        self.require(not found, "no arrival", found)
        self.intact()

    def is_true(self, orders: Sequence[Order], outcomes: Mapping[Order, Completion]) -> None:
        """Of these orders to the consumer, those that are DONE are in place, and have arrived."""
        done = [order for order in orders if outcomes[order].outcome is WriteOutcome.DONE]
        self.arrivals({order.name for order in done if order.length_bytes})
        for order in done:
            self.require(
                self.in_place(order, self.consumer), "the bytes of a WRITE DONE", "some are missing"
            )

    def intact(self) -> None:
        """The consumer's memory is like the image."""
        self._compare(self.consumer.memory, self.image)

    def untouched(self, end: EndHandle) -> None:
        """Another end's memory is as it was wiped."""
        self._compare(end.memory, np.full_like(end.memory, self.wiped))

    def in_place(self, order: Order, target: EndHandle, writer: EndHandle | None = None) -> bool:
        """Whether all bytes of an order are where they belong."""
        writer = self.producer if writer is None else writer
        pairs = zip(order.source.tolist(), order.destination.tolist(), strict=True)
        return all(
            np.array_equal(
                writer.memory[source - writer.address : source - writer.address + length],
                target.memory[to - target.address : to - target.address + length],
            )
            for (source, length), (to, _) in pairs
        )

    def _compare(self, seen: Bytes, expected: Bytes) -> None:
        if (seen.view(np.uint64) == expected.view(np.uint64)).all():
            return
        wrong = np.flatnonzero(seen != expected)
        at = int(wrong[0])
        self.require(
            False,
            "every byte that was written, and no other, in its place",
            f"{len(wrong)} bytes differ, the first at offset {at}: "
            f"{int(seen[at]):#x} instead of {int(expected[at]):#x}",
        )

    # -- verdicts

    def require(self, holds: bool, expected: str, seen: object) -> None:
        """Go on only if it holds.

        Raises:
            ConformanceError: It does not.
        """
        if not holds:
            raise ConformanceError(self.check, expected, str(seen))

    def equal(self, seen: object, expected: object, what: str) -> None:
        """Go on only if both are equal."""
        self.require(seen == expected, f"{what} = {expected!r}", repr(seen))

    def until(self, holds: Callable[[], bool], expected: str, seen: Callable[[], str]) -> None:
        """Wait for something that must come."""
        until = time.monotonic() + self.limits.patience_s
        while not holds():
            if time.monotonic() >= until:
                self.require(False, expected, seen())
            time.sleep(0.001)

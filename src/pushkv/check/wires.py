"""Connections between two workers: ordered, lost with everything on them, never out of order."""

from __future__ import annotations

from attrs import evolve, frozen

from pushkv.core.copies import replace
from pushkv.core.messages import Grant, Message, Ping

__all__ = ["CONSUMER", "PER_PAIR", "PRODUCER", "End", "Pair", "Wire", "aged"]

CONSUMER, PRODUCER = 0, 1
"""Which end of a wire, and whose queue."""

PER_PAIR = 100
"""Connection numbers of one pair of workers: its position times this, and counting."""


class End:
    """What an end of a connection is, as plain words in states."""

    OPEN = "open"
    HUNG_UP = "hung up"
    SHUT = "shut"


@frozen
class Wire:
    """One connection: its two ends, and what is on its way to either."""

    number: int
    ends: tuple[str, str] = (End.OPEN, End.OPEN)
    queues: tuple[tuple[Message, ...], tuple[Message, ...]] = ((), ())

    def sent(self, by: int, message: Message) -> Wire:
        """A message leaves one end; nobody gets it where the other is closed."""
        to = 1 - by
        if self.ends[by] != End.OPEN or self.ends[to] != End.OPEN:
            return self
        return evolve(self, queues=_with(self.queues, to, (*self.queues[to], message)))

    def taken(self, to: int) -> Wire:
        """The first message on its way to one end is there."""
        return evolve(self, queues=_with(self.queues, to, self.queues[to][1:]))

    def closed(self, end: int, how: str) -> Wire:
        """One end is closed; what was on its way there is lost, what it sent is not."""
        ends = (how, self.ends[1]) if end == CONSUMER else (self.ends[0], how)
        return evolve(self, ends=ends, queues=_with(self.queues, end, ()))


def _with(
    queues: tuple[tuple[Message, ...], tuple[Message, ...]], end: int, queue: tuple[Message, ...]
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    return (queue, queues[1]) if end == CONSUMER else (queues[0], queue)


@frozen
class Pair:
    """All connections two workers have; `made` counts those there ever were."""

    made: int = 0
    wires: tuple[Wire, ...] = ()

    def wire(self, number: int) -> Wire | None:
        """The connection of that number, unless both its ends are closed."""
        return next((each for each in self.wires if each.number == number), None)

    def overtaken(self, number: int, end: int) -> Pair | None:
        """The pair where the second message of a queue has overtaken the first; None for none."""
        wire = self.wire(number)
        if wire is None or len(wire.queues[end]) < 2:
            return None
        first, second, *rest = wire.queues[end]
        return self.put(evolve(wire, queues=_with(wire.queues, end, (second, first, *rest))))

    def put(self, wire: Wire) -> Pair:
        """The pair with one connection changed, or gone."""
        wires = tuple(wire if each.number == wire.number else each for each in self.wires)
        gone = wire.ends == (End.SHUT, End.SHUT)
        return evolve(
            self, wires=tuple(each for each in wires if not (gone and each.number == wire.number))
        )


def aged(pair: Pair, by: int, lease: int) -> Pair:
    """One step of time on the producer's clock, whose readings PING and GRANT carry."""

    def message(each: Message) -> Message:
        if isinstance(each, Ping | Grant):
            return replace(each, stamp=max(each.stamp - by, -lease - 1))
        return each

    wires = tuple(
        evolve(
            wire,
            queues=(
                tuple(message(each) for each in wire.queues[0]),
                tuple(message(each) for each in wire.queues[1]),
            ),
        )
        for wire in pair.wires
    )
    return evolve(pair, wires=wires)

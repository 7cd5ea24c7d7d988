"""Whose WRITE is posted next: a budget of bytes for each consumer, and turns within it.

A transport posts in the order in which it was told to, and nothing takes a WRITE back once it is
posted (NIXL cannot cancel one). So it is told of no more than it can use: towards each consumer
WRITEs are posted as long as less than `budget_bytes` are under way, and the rest waits here, where
it can be withdrawn at once (R8: what was never posted is proven not to land). Long ranges are cut
into parts of a quarter of the budget (`Policy.part_tokens`), and attempts take turns, part by part.

So a WRITE waits for the budget and a part more of each other consumer, and for that and a part of
each other attempt of its own. The budget is not one for all consumers: what is under way to one
that has died may take a minute to be reported, and must not keep the others waiting.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from fractions import Fraction
from math import lcm

from attrs import define, field

from pushkv.core.effects import PostWrite
from pushkv.core.ids import AttemptId, Worker
from pushkv.layout import CacheLayout

__all__ = ["PARTS_UNDER_WAY", "Turns", "part_tokens"]

PARTS_UNDER_WAY = 4
"""So many full parts make the budget: while one is reported and followed by the next, the others
keep the wire busy."""


def part_tokens(layout: CacheLayout, budget_bytes: int) -> int:
    """Tokens of a part of a quarter of the budget: whole blocks of every group, at least one."""
    token_bytes = sum(
        (
            Fraction(region.block_bytes, group.block_tokens)
            for group in layout.groups
            for region in group.regions
        ),
        Fraction(),
    )
    whole = lcm(*(group.block_tokens for group in layout.groups))
    return max(budget_bytes // (PARTS_UNDER_WAY * token_bytes * whole), 1) * whole


@define
class _Line:
    """What one consumer is still to be written.

    Attributes:
        posted_bytes: Bytes under way.
        waiting: What waits, by attempt, in the order of their turns; no entry is empty.
    """

    posted_bytes: int = 0
    waiting: OrderedDict[AttemptId, deque[PostWrite]] = field(factory=OrderedDict)


class Turns:
    """Owned by the runtime's thread.

    Args:
        budget_bytes: A WRITE is posted while less than so many bytes are under way to its consumer.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._lines: dict[Worker, _Line] = {}
        self._changed: dict[Worker, None] = {}

    def wait(self, consumer: Worker, write: PostWrite) -> None:
        """`write` waits for its turn."""
        line = self._lines.setdefault(consumer, _Line())
        line.waiting.setdefault(write.attempt, deque()).append(write)
        self._changed[consumer] = None

    def due(self) -> Iterator[tuple[Worker, PostWrite]]:
        """What is to be posted now, one of each consumer in turn; `posted` must follow each."""
        while self._changed:
            for consumer in tuple(self._changed):
                line = self._lines[consumer]
                if not line.waiting or line.posted_bytes >= self._budget_bytes:
                    del self._changed[consumer]
                    continue
                attempt, writes = line.waiting.popitem(last=False)
                write = writes.popleft()
                if writes:
                    line.waiting[attempt] = writes
                yield consumer, write

    def posted(self, consumer: Worker, length_bytes: int) -> None:
        """A WRITE of so many bytes is under way; 0 where none was made."""
        self._lines[consumer].posted_bytes += length_bytes

    def ended(self, consumer: Worker, length_bytes: int) -> None:
        """It is not any more."""
        self._lines[consumer].posted_bytes -= length_bytes
        self._changed[consumer] = None

    def withdraw(self, consumer: Worker, attempt: AttemptId) -> tuple[PostWrite, ...]:
        """Forget what waits of an attempt, and return it: it was never posted."""
        line = self._lines.get(consumer)
        return () if line is None else tuple(line.waiting.pop(attempt, ()))

    def forget(self, consumer: Worker) -> None:
        """Nothing waits for it, nothing is under way to it, and nothing will be."""
        self._lines.pop(consumer, None)
        self._changed.pop(consumer, None)

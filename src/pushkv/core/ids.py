"""The names everything else is made of: engines, ranks, transfers, attempts, parts, instants.

Rule R9: every message, handle and arrival names consumer incarnation, consumer rank, producer rank,
transfer and attempt. `AttemptId` is that name, whole; nothing in pushkv compares less than all of
it.
"""

from __future__ import annotations

from typing import NewType

from attrs import frozen

__all__ = [
    "FOREVER",
    "NO_BLOCK",
    "AttemptId",
    "Blocks",
    "Duration",
    "EngineId",
    "Epoch",
    "Incarnation",
    "Instant",
    "Part",
    "TransferId",
    "Worker",
    "block_count",
    "seconds",
]

EngineId = NewType("EngineId", str)
"""A stable name of an engine, chosen by whoever deploys it; survives restarts."""

Incarnation = NewType("Incarnation", int)
"""A random unsigned 64-bit number per process life of an engine."""

TransferId = NewType("TransferId", str)
"""One hand-over of one (child) request. The core never parses it or matches a prefix of it."""

Instant = NewType("Instant", int)
"""A reading of the local monotonic clock in nanoseconds. Never crosses the wire as a time."""

Duration = NewType("Duration", int)
"""A length of time in nanoseconds. The only kind of time that crosses the wire."""

FOREVER = Instant(2**63 - 1)
"""The deadline that never comes."""

Blocks = tuple[tuple[int, ...], ...]
"""Block ids of one request at one rank: one tuple per KV cache group, in token order."""

NO_BLOCK = 2**32 - 1
"""Stands in `Blocks` for tokens that are not kept: those that left a sliding window."""


def seconds(value: float) -> Duration:
    """A duration of `value` seconds, rounded to nanoseconds."""
    return Duration(round(value * 1_000_000_000))


def block_count(blocks: Blocks) -> int:
    """The number of blocks in all groups."""
    return sum(len(group) - group.count(NO_BLOCK) for group in blocks)


@frozen(order=True)
class Worker:
    """One rank of one life of one engine: what a link joins, and what a permit belongs to."""

    engine: EngineId
    incarnation: Incarnation
    rank: int


@frozen(order=True)
class Epoch:
    """The name of one link: the pair of random numbers from both HELLOs.

    A control message that arrives under another epoch than the current one is void.
    """

    consumer: int
    producer: int


@frozen(order=True)
class AttemptId:
    """The full name of one registration between one consumer rank and one producer rank (R9).

    `attempt` comes from one counter per consumer incarnation and is never used twice, so that it
    is the fencing token of everything that follows from the registration.
    """

    consumer: EngineId
    consumer_incarnation: Incarnation
    consumer_rank: int
    producer_rank: int
    transfer: TransferId
    attempt: int


@frozen(order=True)
class Part:
    """One WRITE of an attempt: prompt tokens [start, end). Numbers are used once (R10)."""

    number: int
    start: int
    end: int

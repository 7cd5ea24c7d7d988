"""What happened in a fabric, in order, as values: equal runs have equal histories."""

from __future__ import annotations

from attrs import frozen

from pushkv.core.ids import AttemptId, Instant, Worker
from pushkv.transport import WriteOutcome

__all__ = ["Crashed", "Ended", "Entry", "Landed", "Noticed", "PathCut", "PathHealed", "Posted"]


@frozen
class Posted:
    """A WRITE of `length_bytes` passed its permit check and is in flight."""

    at: Instant
    writer: Worker
    target: Worker
    attempt: AttemptId
    part: int
    length_bytes: int


@frozen
class Landed:
    """Bytes of a part were copied to `address` in the memory of `into`."""

    at: Instant
    attempt: AttemptId
    part: int
    into: Worker
    address: int
    length_bytes: int


@frozen
class Ended:
    """The writer was told."""

    at: Instant
    attempt: AttemptId
    part: int
    outcome: WriteOutcome


@frozen
class Noticed:
    """An arrival reached its target."""

    at: Instant
    attempt: AttemptId
    part: int
    target: Worker


@frozen
class Crashed:
    """A worker died."""

    at: Instant
    worker: Worker


@frozen
class PathCut:
    """Nothing gets from place `source` to place `target` any more."""

    at: Instant
    source: str
    target: str


@frozen
class PathHealed:
    """Bytes pass from place `source` to place `target` again."""

    at: Instant
    source: str
    target: str


Entry = Posted | Landed | Ended | Noticed | Crashed | PathCut | PathHealed

"""What happened in a fabric, in order, as values: equal runs have equal histories."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from attrs import frozen

from pushkv.core.ids import AttemptId, Instant, Worker
from pushkv.transport import WriteOutcome

__all__ = [
    "Crashed",
    "Ended",
    "Entry",
    "History",
    "Landed",
    "Noticed",
    "PathCut",
    "PathHealed",
    "Posted",
]


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
    writer: Worker
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


class History:
    """The newest `most` entries, oldest first; `observer` hears of each as it is added."""

    def __init__(self, most: int, observer: Callable[[Entry], None] | None) -> None:
        self._entries: deque[Entry] = deque(maxlen=most)
        self._observer = observer

    def append(self, entry: Entry) -> None:
        """Something has happened."""
        self._entries.append(entry)
        if self._observer is not None:
            self._observer(entry)

    def extend(self, entries: Iterable[Entry]) -> None:
        """Several things have happened, in this order."""
        for entry in entries:
            self.append(entry)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

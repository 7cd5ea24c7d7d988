"""KV that a running prefill step is still computing, layer by layer (see `Computed.step`).

The engine's threads say which layers exist; WRITEs that were ordered when the step began wait here
until then, and nobody polls for it: the engine's word rings the runtime's bell. What is ordered
stays one part for the core. Where DONE means visible, so that no arrival has to name it, it is
posted in shares of some layers each, and its completions are made one again; elsewhere it is one
WRITE that waits for the whole step. Only what the engine has said and its device has not done yet
is for the transport to hold back (`Write.ready`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from attrs import define, evolve, frozen

from pushkv.core.errors import TransportError
from pushkv.core.ids import AttemptId
from pushkv.transport import Completion, Write, WriteOutcome

__all__ = ["Gate", "Share", "Shares", "Step", "Steps"]

KEPT = 64
"""A step that so many others have followed is over."""
FIRST_SHARE = 1 << 31
"""Shares of a part have numbers from here on."""
SHARES_MOST = 1 << 12

SHARE_BYTES_LEAST = 8 * 1024 * 1024
"""So many layers leave together: each share wakes three threads, which takes from the model."""

Exists = Callable[[], bool]


def _now() -> bool:
    return True


def _quiet() -> None:
    return


class Step:
    """One step of the engine. Written by its threads, read by the runtime's and the transport's.

    Args:
        ring: Called, in the engine's thread, when something that is awaited has been said.
    """

    def __init__(self, ring: Callable[[], None] = _quiet) -> None:
        self._ring = ring
        self._regions: dict[int, Exists] = {}
        self._all: Exists | None = None
        self._awaited: set[int] = set()
        self._is_awaited = False

    def computed(self, region: int, exists: Exists = _now) -> None:
        """The layer whose region begins at this address is computed once `exists` says so."""
        self._regions.setdefault(region, exists)
        if region in self._awaited:
            self._ring()

    def end(self, exists: Exists = _now) -> None:
        """Every layer is."""
        self._all = exists
        if self._is_awaited:
            self._ring()

    def await_(self, regions: Sequence[int]) -> None:
        """Ring for the last of `regions`, as engines compute them in order, and for the end.

        To be called before `exists` is asked: what is said meanwhile is then seen, or rings.
        """
        self._awaited.update(regions[-1:])
        self._is_awaited = True

    def exists(self, regions: Sequence[int]) -> Exists | None:
        """Says whether `regions` exist, or all there is for none; None: the engine did not say."""
        if self._all is not None:
            return self._all
        said = [self._regions.get(region) for region in regions]
        if not said or None in said:
            return None
        each = [one for one in said if one not in (None, _now)]
        return (lambda: all(one() for one in each)) if each else _now

    @property
    def is_over(self) -> bool:
        """Whether all of it exists."""
        return self._all is not None and self._all()


class Steps:
    """The latest steps of an engine, by their numbers, which ascend. Thread-safe.

    Args:
        ring: As of `Step`.
    """

    def __init__(self, ring: Callable[[], None] = _quiet) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._steps: dict[int, Step] = {}
        self._over = 0

    def __getitem__(self, number: int) -> Step:
        """The step of that number, which may not have begun."""
        with self._lock:
            if number <= self._over:
                step = Step()
                step.end()
                return step
            step = self._steps.setdefault(number, Step(self._ring))
            while len(self._steps) > KEPT:
                self._over = min(self._steps)
                self._steps.pop(self._over).end()
            return step


@define(eq=False)
class Gate:
    """What a WRITE waits for; `is_withdrawn` ends that."""

    step: Step
    is_withdrawn: bool = False

    def opens(self, regions: Sequence[int]) -> Exists | None:
        """As `Step.exists`; what it returns raises once this is withdrawn.

        Raises:
            TransportError: Nobody wants it any more: nothing is to be posted.
        """
        exists = self.step.exists(regions)
        return None if exists is None else partial(self._is_open, exists)

    def _is_open(self, exists: Exists) -> bool:
        if self.is_withdrawn:
            raise TransportError("the attempt was withdrawn while its step ran")
        return exists()


@frozen(eq=False)
class Share:
    """A WRITE that waits for `regions`, or for all there is if none are named."""

    write: Write
    gate: Gate
    regions: tuple[int, ...]

    def due(self) -> Write | None:
        """The WRITE as it is to be posted, or None while the engine has not said that it exists."""
        exists = self.gate.opens(self.regions)
        return None if exists is None else evolve(self.write, ready=None if exists() else exists)


@define
class _Part:
    """A part that was posted as several shares: how many are not over, and what is known so far."""

    length_bytes: int
    left: int
    is_touched: bool = False
    source_idle: bool = True
    outcome: WriteOutcome = WriteOutcome.DONE
    cause: str = ""


WORSE = (WriteOutcome.DONE, WriteOutcome.REFUSED, WriteOutcome.FAILED, WriteOutcome.UNKNOWN)


class Shares:
    """WRITEs that are posted share by share, and what became of each as a whole."""

    def __init__(self) -> None:
        self._parts: dict[tuple[AttemptId, int], _Part] = {}

    def of(self, write: Write, gate: Gate, regions: tuple[int, ...]) -> Iterator[Share]:
        """`write` as shares of some of `regions` each, to whose rows it is equal, in order.

        As one, which waits for all of the step, where there are no regions or too many.
        """
        count = len(regions)
        if not 1 < count <= SHARES_MOST or write.part >= FIRST_SHARE // SHARES_MOST:
            yield Share(write, gate, ())
            return
        together = max(-(-SHARE_BYTES_LEAST * count // max(write.length_bytes, 1)), 1)
        firsts = range(0, count, min(together, count))
        self._parts[write.attempt, write.part] = _Part(write.length_bytes, len(firsts))
        rows = len(write.source) // count
        for number, first in enumerate(firsts):
            mine = regions[first : first + firsts.step]
            chosen = slice(first * rows, (first + len(mine)) * rows)
            share = evolve(
                write,
                part=FIRST_SHARE + write.part * SHARES_MOST + number,
                source=write.source[chosen],
                destination=write.destination[chosen],
            )
            yield Share(share, gate, mine)

    def whole(self, news: Completion) -> Completion | None:
        """What became of a part, once the last of its shares is over; else None.

        The worst that became of one; but a refusal says that nothing was posted (R5), so that some
        refused and some not are FAILED.
        """
        if news.part < FIRST_SHARE:
            return news
        number = (news.part - FIRST_SHARE) // SHARES_MOST
        part = self._parts[news.attempt, number]
        part.left -= 1
        part.is_touched |= news.outcome is not WriteOutcome.REFUSED
        part.source_idle &= news.source_idle
        if WORSE.index(news.outcome) > WORSE.index(part.outcome):
            part.outcome, part.cause = news.outcome, news.cause
        if part.left:
            return None
        del self._parts[news.attempt, number]
        outcome = part.outcome
        if outcome is WriteOutcome.REFUSED and part.is_touched:
            outcome = WriteOutcome.FAILED
        length_bytes = part.length_bytes if outcome is WriteOutcome.DONE else 0
        return Completion(news.attempt, number, outcome, length_bytes, part.cause, part.source_idle)

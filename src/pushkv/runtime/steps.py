"""KV that a running prefill step is still computing, layer by layer (see `Computed.step`).

The engine's threads say which layers exist; WRITEs that were ordered when the step began ask. What
is ordered stays one part for the core. Where DONE means visible, so that no arrival has to name it,
it is posted as one WRITE for each region, which its transport holds back until that exists
(`Write.ready`), and its completions are made one again; elsewhere it is one WRITE that waits for
the whole step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

from attrs import define, evolve

from pushkv.core.errors import TransportError
from pushkv.core.ids import AttemptId
from pushkv.transport import Completion, Write, WriteOutcome

__all__ = ["Gate", "Shares", "Step", "Steps"]

KEPT = 64
"""A step that so many others have followed is over."""
FIRST_SHARE = 1 << 31
"""Shares of a part have numbers from here on."""
SHARES_MOST = 1 << 12

Exists = Callable[[], bool]


def _now() -> bool:
    return True


class Step:
    """One step of the engine. Written by its threads, read by the runtime's and the transport's."""

    def __init__(self) -> None:
        self._regions: dict[int, Exists] = {}
        self._all: Exists | None = None

    def computed(self, region: int, exists: Exists = _now) -> None:
        """The layer whose region begins at this address is computed once `exists` says so."""
        self._regions.setdefault(region, exists)

    def end(self, exists: Exists = _now) -> None:
        """Every layer is."""
        self._all = exists

    @property
    def is_over(self) -> bool:
        """Whether all of it exists."""
        return self._all is not None and self._all()

    def has(self, region: int) -> bool:
        """Whether the region that begins at this address has what the step was to compute."""
        exists = self._regions.get(region)
        return (exists is not None and exists()) or self.is_over


class Steps:
    """The latest steps of an engine, by their numbers, which ascend. Thread-safe."""

    def __init__(self) -> None:
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
            step = self._steps.setdefault(number, Step())
            while len(self._steps) > KEPT:
                self._over = min(self._steps)
                self._steps.pop(self._over).end()
            return step


@define(eq=False)
class Gate:
    """What a WRITE waits for; `is_withdrawn` ends that."""

    step: Step
    is_withdrawn: bool = False

    def ready(self, region: int | None) -> bool:
        """Whether a region, or all there is, exists.

        Raises:
            TransportError: Nobody wants it any more: nothing is to be posted.
        """
        if self.is_withdrawn:
            raise TransportError("the attempt was withdrawn while its step ran")
        return self.step.is_over if region is None else self.step.has(region)


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

    def of(self, write: Write, gate: Gate, regions: tuple[int, ...]) -> Iterator[Write]:
        """`write` as one for each of `regions`, to whose rows it is equal, in order; or as one.

        One, which waits for all, where there are none or too many.
        """
        count = len(regions)
        if not 1 < count <= SHARES_MOST or write.part >= FIRST_SHARE // SHARES_MOST:
            yield evolve(write, ready=partial(gate.ready, None))
            return
        self._parts[write.attempt, write.part] = _Part(write.length_bytes, count)
        rows = len(write.source) // count
        for number, region in enumerate(regions):
            mine = slice(number * rows, (number + 1) * rows)
            yield evolve(
                write,
                part=FIRST_SHARE + write.part * SHARES_MOST + number,
                source=write.source[mine],
                destination=write.destination[mine],
                ready=partial(gate.ready, region),
            )

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

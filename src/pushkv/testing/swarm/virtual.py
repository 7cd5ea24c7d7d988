"""Event loops whose time is virtual: when nothing is left to run, it jumps to the next timer.

The same seed gives the same run, in every process.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from heapq import heappop, heappush

import anyio

from pushkv.core.errors import MissingDependencyError
from pushkv.core.ids import FOREVER, Instant

__all__ = ["Agenda", "Backend", "Clock", "run_virtually"]

Clock = Callable[[], float]
"""Virtual seconds."""


class Backend(StrEnum):
    """Whose event loop."""

    ASYNCIO = "asyncio"
    TRIO = "trio"


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps: what nobody is ready for is waited for in virtual time."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is not None and timeout > 0:
            self.now_s += timeout
        return ready


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(backend: Backend, seed: int, main: Callable[[Clock], Awaitable[None]]) -> None:
    """Run `main` in virtual time; on trio, `seed` decides the order of tasks that are ready.

    `main` is given the loop's clock, which is read some hundred times per transfer.

    There must always be a timer: a loop that waits for nothing waits for ever.

    Raises:
        MissingDependencyError: trio is not installed.
    """
    if backend is Backend.ASYNCIO:

        async def begin() -> None:
            await main(asyncio.get_running_loop().time)

        anyio.run(begin, backend="asyncio", backend_options={"loop_factory": _JumpingLoop})
        return
    try:
        import trio.testing
    except ImportError as error:
        raise MissingDependencyError("a swarm on trio needs it: pip install trio") from error
    clock = trio.testing.MockClock(autojump_threshold=0)
    with _ordered_by(seed):
        anyio.run(main, clock.current_time, backend="trio", backend_options={"clock": clock})


@contextmanager
def _ordered_by(seed: int) -> Iterator[None]:
    """Trio shuffles the tasks that are ready; as its own plugin for hypothesis does, seed that."""
    from trio._core import _run as scheduler

    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    state = scheduler._r.getstate()
    scheduler._r.seed(seed)
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
        scheduler._r.setstate(state)


class Agenda:
    """What is to happen when, besides what the runtimes do: one task, one order of time.

    Args:
        clock: The loop's.
        advance: Called first at each instant; what else has its own schedule.
        next_due: When `advance` has something to do.
        guarded: Runs each step.
    """

    def __init__(
        self,
        clock: Clock,
        advance: Callable[[Instant], None],
        next_due: Callable[[], Instant],
        guarded: Callable[[Callable[[], None]], None],
    ) -> None:
        self._clock = clock
        self._guarded = guarded
        self._advance = advance
        self._next_due = next_due
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._bell = anyio.Event()
        self._wakes_at = 0
        self.over = False
        """Set it to end `run`, then `ring`."""

    def now(self) -> Instant:
        """Virtual nanoseconds since the loop began."""
        return Instant(round(self._clock() * 1e9))

    def after(self, wait_ns: int, step: Callable[[], None]) -> None:
        """Run `step` that much later; steps of one instant run in the order of these calls."""
        due = self.now() + wait_ns
        heappush(self._heap, (due, self._count, step))
        self._count += 1
        if due < self._wakes_at:
            self._bell.set()

    def ring(self) -> None:
        """There may be something earlier to do."""
        if self._wakes_at:
            self._bell.set()

    async def run(self) -> None:
        """Do everything in order of time, until `over`."""
        while not self.over:
            self._bell = anyio.Event()
            self._wakes_at = 0  # nobody need ring for what is about to be looked at
            now = self.now()
            self._catch_up(now)
            while self._heap and self._heap[0][0] <= now and not self.over:
                self._guarded(heappop(self._heap)[2])
                self._catch_up(now)
            due = min(self._next_due(), self._heap[0][0] if self._heap else FOREVER)
            self._wakes_at = due
            with anyio.move_on_after(max(due - now, 0) / 1e9):
                await self._bell.wait()

    def _catch_up(self, now: Instant) -> None:
        if self._next_due() <= now:
            self._advance(now)

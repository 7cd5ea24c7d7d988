"""Both ends in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from pushkv.core.ids import Worker
from pushkv.transport import Transport

from .end import LARGE_BYTES, Bytes, End, memory_bytes
from .ends import EndHandle
from .report import NotApplicable

__all__ = ["LocalEnds"]

P = ParamSpec("P")
R = TypeVar("R")


class LocalHandle:
    """An end of this process, with a thread of its own that makes all its calls."""

    def __init__(self, ends: LocalEnds, worker: Worker, predecessor: EndHandle | None) -> None:
        self.worker = worker
        if predecessor is None:
            self.memory: Bytes = np.zeros(memory_bytes(ends.large_bytes), np.uint8)
        else:
            self.memory = predecessor.memory
        self.address: int = int(self.memory.ctypes.data)
        self._ends = ends
        self._thread = ThreadPoolExecutor(1, f"end-{worker.engine}")
        self._crashed = False
        try:
            self._end = self._thread.submit(
                End, ends.factory, worker, self.memory, self.address, ends.large_bytes
            ).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def begin(
        self, function: Callable[Concatenate[End, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], R]:
        """Call `function` in the end's own thread."""
        return self._thread.submit(function, self._end, *args, **kwargs).result

    def run(
        self, function: Callable[Concatenate[End, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call `function` in the end's own thread and wait."""
        return self.begin(function, *args, **kwargs)()

    def crash(self) -> None:
        """End it by what `LocalEnds` was given for that."""
        if self._ends.crash is None:
            raise NotApplicable("an end of this process cannot crash by itself")
        self._crashed = True
        self._ends.crash(self.worker)

    def pause(self) -> None:
        """Stop it by what `LocalEnds` was given for that."""
        if self._ends.pause is None:
            raise NotApplicable("an end of this process cannot be stopped")
        self._ends.pause(self.worker)

    def resume(self) -> None:
        """Let it go on."""
        if self._ends.resume is not None:
            self._ends.resume(self.worker)

    def close(self) -> None:
        """Close the transport and end the thread."""
        if not self._crashed:
            self.run(End.close)
        self._thread.shutdown()


class LocalEnds:
    """Ends of one process, for transports that work within one.

    Args:
        factory: Makes a transport that is not started.
        crash: Ends a worker as the death of its process would, where the transport can do that;
            otherwise what happens then is not checked.
        pause: Stops a worker, likewise.
        resume: Lets it go on.
        large_bytes: Length of the larger region of each end's memory, at least 2 MiB.
    """

    def __init__(
        self,
        factory: Callable[[], Transport],
        crash: Callable[[Worker], None] | None = None,
        pause: Callable[[Worker], None] | None = None,
        resume: Callable[[Worker], None] | None = None,
        large_bytes: int = LARGE_BYTES,
    ) -> None:
        self.large_bytes = large_bytes
        self.factory = factory
        self.crash = crash
        self.pause = pause
        self.resume = resume
        self.can_crash: bool = crash is not None
        self.can_pause: bool = pause is not None and resume is not None
        self._handles: list[LocalHandle] = []

    def open(self, worker: Worker, predecessor: EndHandle | None = None) -> EndHandle:
        """Begin an end."""
        handle = LocalHandle(self, worker, predecessor)
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        """Close every end, the last one first."""
        while self._handles:
            self._handles.pop().close()

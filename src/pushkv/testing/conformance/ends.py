"""How the checks reach the two ends of a transfer, wherever those are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pushkv.core.ids import Worker

from .end import Bytes, End

__all__ = ["EndHandle", "TransportEnds"]

P = ParamSpec("P")
R = TypeVar("R")


class EndHandle(Protocol):
    """One end, as the checks see it from outside.

    Attributes:
        worker: Who it is.
        memory: Its memory, as seen from here: uint8, shape (memory_bytes(large_bytes),). It
            outlives the end.
    """

    worker: Worker
    memory: Bytes

    @property
    def address(self) -> int:
        """Where its memory begins, as its own process counts."""

    def begin(
        self, function: Callable[Concatenate[End, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], R]:
        """Call `function` with the `End`, where that lives; what is returned waits for the result.

        The next call waits for this one: all calls of an end are made by one thread. Function and
        arguments can be pickled.
        """

    def run(
        self, function: Callable[Concatenate[End, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call `function` with the `End` and wait for the result; what it raises is raised here."""

    def crash(self) -> None:
        """End it as a crash does: unannounced, at once. Its memory can still be read from here."""

    def pause(self) -> None:
        """Stop it: it does nothing and answers nothing until `resume`."""

    def resume(self) -> None:
        """Let it go on."""

    def close(self) -> None:
        """Close its transport, unless it crashed, and end what it ran in."""


class TransportEnds(Protocol):
    """Where ends live.

    Attributes:
        can_crash: Whether its handles can `crash`.
        can_pause: Whether they can `pause` and `resume`.
        large_bytes: Length of the larger of the two regions of each end's memory, in bytes.
    """

    can_crash: bool
    can_pause: bool
    large_bytes: int

    def open(self, worker: Worker, predecessor: EndHandle | None = None) -> EndHandle:
        """Begin an end, a `pushkv.testing.conformance.end.End` with started transport.

        A predecessor is one of the same engine that crashed: the new one has its memory at the
        same addresses, if that can be had.
        """

    def close(self) -> None:
        """Close every end that is still there."""

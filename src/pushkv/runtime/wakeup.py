"""A bell that any thread may ring and one task waits for."""

from __future__ import annotations

import socket

import anyio
import anyio.lowlevel

__all__ = ["Wakeup"]


class Wakeup:
    """Rings at least once after each `set`; rings that nobody has heard yet are one.

    A pair of sockets, because an event loop can wait for one without polling and a `set` from a
    foreign thread then costs one system call, at most, and never waits.
    """

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._rung = False

    def set(self) -> None:
        """Ring. Thread-safe; never blocks."""
        if self._rung:
            return
        self._rung = True
        try:
            self._far.send(b"\0")
        except (BlockingIOError, OSError):
            # Full: it rings already. Closed: nobody waits.
            return

    async def wait(self) -> None:
        """Until rung since the last `clear`. Lets other tasks run even where it rings already."""
        if self._rung:
            # Whoever rings without a pause must not keep the event loop from its sockets.
            await anyio.lowlevel.checkpoint()
        else:
            await anyio.wait_readable(self._near)

    def clear(self) -> None:
        """Forget the rings so far. What they announced must be looked at *after* this."""
        try:
            while self._near.recv(4096):
                pass
        except BlockingIOError:
            pass
        self._rung = False

    def close(self) -> None:
        """Release both sockets."""
        self._near.close()
        self._far.close()

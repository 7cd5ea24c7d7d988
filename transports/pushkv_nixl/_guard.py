"""Calls into NIXL that may never return, and who may make another.

NIXL over LIBFABRIC retries for ever what a dead peer does not take: the thread that posts, or that
loads the peer, does not come back. Nothing can end such a call, so its thread and its agent are
given up, and others take their place. Between two calls a thread may still change its mind; the
lock here is what makes "it is in that call, and will make no other" certain.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["Abandoned", "Guard", "keep_for_ever", "run_when_idle"]


class Abandoned(BaseException):
    """This thread was given up while a call of its kept it: it touches nothing any more."""


class Guard:
    """The calls of one thread. `abandon` and `call` are for other threads.

    Attributes:
        call: The call the thread is in, "" between calls.
        count: Calls so far.
        abandoned: Whether the thread was given up; final.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.call = ""
        self.count = 0
        self.abandoned = False

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Make a call.

        Raises:
            Abandoned: The thread was given up: the call must not be made.
        """
        with self._lock:
            if self.abandoned:
                raise Abandoned
            self.count += 1
            self.call = call
        try:
            yield
        finally:
            with self._lock:
                self.call = ""

    def abandon(self, count: int) -> bool:
        """Give the thread up if it is in call number `count`; whether it was."""
        with self._lock:
            if not self.call or self.count != count:
                return False
            self.abandoned = True
            return True


def keep_for_ever(thing: object) -> None:
    """Never end this object, not even at exit: the end of a hung agent would hang all threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def run_when_idle(native_id: int) -> None:
    """Let a thread of this process run only on cores that nobody else wants."""
    with suppress(OSError):
        os.sched_setscheduler(native_id, os.SCHED_IDLE, os.sched_param(0))

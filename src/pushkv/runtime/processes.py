"""Which process speaks, and whether it is dead for certain: on one host the kernel knows.

A refused connection or an error proves nothing about bytes in flight (R14); that the writing
process has ended does, once the transport's `death_bound` has passed. A pidfd names one process for
as long as it is held, whatever becomes of its number, and turns readable when it has ended.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from .descriptors import are_descriptors_short

__all__ = ["ProcessEndedError", "open_process", "this_process"]

_PROC = Path("/proc")


class ProcessEndedError(Exception):
    """The process that was named has ended for certain."""


def this_process() -> str:
    """This process as others on its host may know it; "" where that cannot be said.

    Four words: the host's boot, the pid namespace, the process's number and when it began.
    """
    try:
        return " ".join((*_host(), str(os.getpid()), _began(os.getpid())))
    except OSError:
        return ""


def _host() -> tuple[str, str]:
    """Where a number means the same process: one boot of one kernel, one pid namespace."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return boot, str((_PROC / "self/ns/pid").readlink())


def _began(pid: int) -> str:
    """In ticks since boot: numbers of processes are used again, with this they are not."""
    stat = (_PROC / str(pid) / "stat").read_text()
    return stat.rpartition(")")[2].split()[19]


def open_process(name: str) -> int | None:
    """A pidfd of the process `name`, or None where this host cannot tell. Never blocks.

    Args:
        name: What `this_process` said there, or anything else that a peer sent.

    Raises:
        ProcessEndedError: It has ended.
        OSError: No descriptor is left to tell it with; ask again later.
    """
    words = name.split(" ")
    try:
        if len(words) != 4 or (words[0], words[1]) != _host() or not words[2].isdecimal():
            return None
        opened = os.pidfd_open(int(words[2]))
    except ProcessLookupError:
        raise ProcessEndedError(name) from None
    except OSError as error:
        if are_descriptors_short(error):
            raise
        return None  # not allowed
    except (OverflowError, AttributeError):  # no number of a process, or not Linux
        return None
    try:
        # Held by now is whoever has the number today.
        ended = _began(int(words[2])) != words[3]
    except OSError:  # reaped meanwhile, or hidden from us
        looked = select.poll()  # `select.select` cannot look at descriptors above 1023
        looked.register(opened, select.POLLIN)
        ended = bool(looked.poll(0))
    if not ended:
        return opened
    os.close(opened)
    raise ProcessEndedError(name)

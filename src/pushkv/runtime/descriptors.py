"""Whether this process has file descriptors left for another peer."""

from __future__ import annotations

import errno
import os

__all__ = ["DESCRIPTORS_LEAST", "are_descriptors_short", "expect_descriptors"]

DESCRIPTORS_LEAST = 16
"""So many must be left for a new peer: a socket, a pidfd, its transport's connections, a spare."""

_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def are_descriptors_short(error: OSError) -> bool:
    """Whether `error` says that nothing can be opened now, though perhaps later."""
    return error.errno in _SHORT


def expect_descriptors(count: int = DESCRIPTORS_LEAST) -> None:
    """Nothing, where `count` more descriptors can be had.

    They are opened and closed again: no other way accounts for the system's limits too.

    Raises:
        OSError: Too few are left.
    """
    held: list[int] = []
    try:
        held.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(count))
    except OSError as error:
        if not are_descriptors_short(error):
            raise
        cause = f"fewer than {count} descriptors are left (raise `ulimit -n`)"
        raise OSError(error.errno, cause) from None
    finally:
        for each in held:
            os.close(each)

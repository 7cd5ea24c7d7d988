"""A process that has hardly any file descriptors left."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["few_descriptors"]


@contextmanager
def few_descriptors(leave: int = 6) -> Iterator[None]:
    """Of the descriptors that this process may have, only so many are left."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 40
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for _ in range(leave):
                os.close(taken.pop())
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

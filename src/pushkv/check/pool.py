"""Worker processes that end with their parent, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait

__all__ = ["CONTEXT", "workers"]

CONTEXT = multiprocessing.get_context("spawn")


@contextmanager
def workers(
    jobs: int, begin: Callable[..., None] | None = None, arguments: tuple[object, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """A pool of `jobs` processes, each begun with ``begin(*arguments)``.

    Leaving normally waits for what was submitted; leaving with an exception, Ctrl-C included, kills
    the workers at once.
    """
    pool = ProcessPoolExecutor(jobs, CONTEXT, initializer=_begin, initargs=(begin, arguments))
    try:
        yield pool
    except BaseException:
        # Not cancelled first: the pool's thread would then fail what is cancelled, and say so.
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown()
        raise
    pool.shutdown()


def _begin(begin: Callable[..., None] | None, arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if begin is not None:
        begin(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    wait([parent.sentinel])
    os._exit(1)

"""No check leaves anything running behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from .memory_ends import end_fabrics

END_S = 10.0


@pytest.fixture(autouse=True)
def no_fabric_is_left() -> Iterator[None]:
    """The fabrics' threads end with their last WRITE."""
    yield
    end_fabrics()
    until = time.monotonic() + END_S
    while any(thread.name == "pushkv-memory" for thread in threading.enumerate()):
        assert time.monotonic() < until, "a fabric's thread does not end"
        time.sleep(0.005)

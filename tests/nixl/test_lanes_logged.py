"""UCX says which lanes it chose, and says it where a log belongs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nixl

START = """
from pushkv.core.ids import EngineId, Incarnation, Worker
from pushkv_nixl import NixlTransport
import numpy as np, os, time
from pushkv.transport import Region
memory = np.zeros(4096, dtype=np.uint8)
transport = NixlTransport()
region = Region(memory.ctypes.data, memory.nbytes)
transport.start(Worker(EngineId("lanes"), Incarnation(7), 0), [region], time.monotonic_ns, print)
assert transport.close(5.0)
print(os.environ.get("UCX_LOG_LEVEL"))
"""


@pytest.mark.parametrize("level", [None, "error"])
def test_the_chosen_lanes_are_logged_unless_a_level_is_set(level: str | None) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "UCX_LOG_LEVEL"}
    if level is not None:
        environment["UCX_LOG_LEVEL"] = level
    ran = subprocess.run(
        [sys.executable, "-c", START],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(level)], (
        "our setting is gone again, and no line of UCX's here"
    )
    lanes = [line for line in ran.stderr.splitlines() if "cfg#" in line and "am(" in line]
    assert bool(lanes) == (level is None), ran.stderr

"""These tests run by `make libfabric`, where NIXL's LIBFABRIC plugin loads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOAD = """
import time
from pushkv.core.ids import EngineId, Incarnation, Worker
from pushkv_nixl import NixlTransport
transport = NixlTransport(backend="LIBFABRIC", fabric="tcp")
transport.start(Worker(EngineId("probe"), Incarnation(1), 0), [], time.monotonic_ns, print)
raise SystemExit(not transport.close(5.0))
"""


def why_not() -> str:
    """Why these tests cannot run here; "" if they can."""
    if not os.environ.get("PUSHKV_LIBFABRIC"):
        return "run by `make libfabric`, in an environment of their own"
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD], capture_output=True, text=True, check=False
    )
    if not loaded.returncode:
        return ""
    # NIXL says at its first line why a library does not load, Python at the last what comes of it.
    lines = loaded.stderr.strip().splitlines() or ["no reason given"]
    return f"LIBFABRIC does not start here: {lines[0]} … {lines[-1]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of them, with the reason."""
    mine = [item for item in items if item.path.parent.name == "libfabric"]
    reason = why_not() if mine else ""
    if reason:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))

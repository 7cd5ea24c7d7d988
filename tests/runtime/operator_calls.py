"""Speaks to an admin endpoint as a client does, and as one that does not keep to HTTP."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attrs import evolve

from pushkv.core.machines import StepRecord
from pushkv.runtime.admin.state import EngineState
from pushkv_memory import CAPABILITIES, MemoryFabric

WAIT_S = 30.0


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path (a socket's is bounded) that every user may look into."""
    with tempfile.TemporaryDirectory(prefix="pushkv-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


class Bomb:
    """An observer that lets its runtime die, when it is armed: without a word to its peers."""

    armed = False

    def __call__(self, record: StepRecord) -> None:
        if self.armed:
            raise RuntimeError("armed")


def unbounded(**changes: Any) -> MemoryFabric:
    """No fence ends a quarantine here."""
    return MemoryFabric(capabilities=evolve(CAPABILITIES, write_bound=None, **changes))


def ask(path: Path, method: str, target: str, body: object = None) -> tuple[int, Any]:
    """The status of an answer, and what it says."""
    content = b"" if body is None else msgspec.json.encode(body)
    head = f"{method} {target} HTTP/1.1\r\nhost: e\r\ncontent-length: {len(content)}\r\n\r\n"
    answer = say(path, head.encode() + content)
    first, _, told = answer.partition(b"\r\n\r\n")
    return int(first.split(b" ", 2)[1]), msgspec.json.decode(told)


def state(path: Path, query: str = "") -> EngineState:
    """What the engine tells."""
    status, told = ask(path, "GET", f"/v1/state{query}")
    assert status == 200, told
    return msgspec.convert(told, EngineState)


def say(path: Path, data: bytes) -> bytes:
    """Everything that comes back for these bytes, until the end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(str(path))
        heard = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65_536):
                heard += chunk
        except (BrokenPipeError, ConnectionResetError):
            pass
        return heard

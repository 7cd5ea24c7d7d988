"""Speaks to an admin endpoint as a client does, and as one that does not keep to HTTP."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import msgspec

from pushkv.runtime.admin.state import EngineState

WAIT_S = 30.0


def ask(path: Path, method: str, target: str, body: object = None) -> tuple[int, Any]:
    """The status of an answer, and what it says."""
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, timeout=WAIT_S) as client:
        content = None if body is None else msgspec.json.encode(body)
        answer = client.request(method, f"http://engine{target}", content=content)
    return answer.status_code, answer.json()


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

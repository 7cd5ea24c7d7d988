"""The admin endpoint: HTTP/1.1 over a Unix socket, or over TCP with the channel's own credentials.

It lives in the runtime's event loop, and can cost it only so much: no more than `AT_ONCE`
connections are taken at once and `PER_S` in a second, each may ask once, of so many bytes, within
so many seconds, and gets a bounded answer. Whoever comes beyond that waits in the listener's
queue, where it costs nothing. What is malformed harms its own connection.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import anyio
import anyio.abc
import h11
import msgspec
from anyio.streams.tls import TLSStream
from attrs import frozen

from pushkv.core.errors import ConfigurationError
from pushkv.runtime.addresses import innermost
from pushkv.runtime.admission import Allowance
from pushkv.runtime.credentials import Tls

from .operator import Operator, Refusal, ReleaseOrder

__all__ = ["AdminServer"]

log: logging.Logger = logging.getLogger("pushkv.admin")

AT_ONCE = 8
PER_S = 50
EXCHANGE_S = 5.0
"""From the connection to the last byte of its answer."""
HEAD_BYTES_MOST = 16 * 1024
BODY_BYTES_MOST = 64 * 1024
READ_BYTES = 16 * 1024
LISTED = 1_000
"""Entries of each list, where nobody says how many."""
LISTED_MOST = 10_000
BACKLOG = 64
Listener = anyio.abc.Listener[anyio.abc.ByteStream]


@frozen
class _Asked:
    method: str
    path: str
    query: dict[str, list[str]]
    body: bytes


class AdminServer:
    """Answers one engine's operators. Belongs to the runtime's event loop.

    Args:
        operator: Who answers.
        count: Called with the cause of whatever was refused.
        tls: The channel's credentials, for TCP.
    """

    def __init__(
        self, operator: Operator, count: Callable[[str, str], None], tls: Tls | None
    ) -> None:
        self._operator = operator
        self._count = count
        self._tls = tls
        self._listeners: list[tuple[Listener, bool]] = []
        self._path: Path | None = None

    async def listen_at(self, path: Path) -> None:
        """Listen at a Unix socket that only this user, and root, may open.

        Raises:
            ConfigurationError: It cannot be made there, or another engine answers there.
        """
        try:
            if _answers(path):
                raise ConfigurationError(
                    "admin_socket", str(path), "a path of its own: another engine answers there"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            listener = await anyio.create_unix_listener(path, mode=0o600, backlog=BACKLOG)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                "admin_socket", str(path), f"a path for a Unix socket ({error})"
            ) from error
        self._path = path
        self._listeners.append((listener, False))

    async def listen_on(self, host: str, port: int) -> None:
        """Listen on TCP, for whoever has the credentials of the control channel.

        Raises:
            ConfigurationError: The port is taken, or not ours to take.
        """
        try:
            multi = await anyio.create_tcp_listener(
                local_host=host, local_port=port, backlog=BACKLOG
            )
        except OSError as error:
            raise ConfigurationError(
                "admin_port", port, f"a port that is free at {host} ({error})"
            ) from error
        self._listeners += [(each, True) for each in multi.listeners]

    def serve(self, tasks: anyio.abc.TaskGroup) -> None:
        """Answer in `tasks` until they are cancelled."""
        for listener, is_remote in self._listeners:
            tasks.start_soon(self._serve, listener, is_remote, tasks)

    async def close(self) -> None:
        """Listen no more, and take the socket away."""
        for listener, _ in self._listeners:
            await listener.aclose()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    # -- connections

    async def _serve(self, listener: Listener, is_remote: bool, tasks: anyio.abc.TaskGroup) -> None:
        places, allowance = anyio.Semaphore(AT_ONCE), Allowance(PER_S, PER_S)
        while True:
            await places.acquire()
            await anyio.sleep(allowance.spend(1, anyio.current_time()))
            try:
                stream = await listener.accept()  # type: ignore[attr-defined]
            except anyio.ClosedResourceError:
                return
            except OSError as error:
                self._count("admin_refused", str(error))
                places.release()
                continue
            tasks.start_soon(self._exchange, stream, is_remote, places)

    async def _exchange(
        self, stream: anyio.abc.ByteStream, is_remote: bool, places: anyio.Semaphore
    ) -> None:
        """One connection: one question, one answer; nothing that happens here harms another."""
        try:
            with anyio.fail_after(EXCHANGE_S):
                if is_remote:
                    assert self._tls is not None, "TCP needs credentials"
                    stream = await TLSStream.wrap(
                        stream,
                        server_side=True,
                        ssl_context=self._tls.server(),
                        standard_compatible=False,
                    )
                await self._answer(stream)
        except Exception as error:  # noqa: BLE001 - whoever connected decides what goes wrong
            self._count("admin_refused", innermost(error))
        finally:
            places.release()
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)

    async def _answer(self, stream: anyio.abc.ByteStream) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MOST)
        try:
            asked = await _read(stream, connection)
            status, answer = self._reply(asked)
        except h11.RemoteProtocolError as error:
            status, answer = error.error_status_hint, _Error(f"this is no request: {error}")
        self._count("admin_answered" if status < 400 else "admin_refused", f"{status}: {answer}")
        body = msgspec.json.encode(answer)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        data = connection.send(h11.Response(status_code=status, headers=headers)) or b""
        data += connection.send(h11.Data(data=body)) or b""
        await stream.send(data)

    # -- questions

    def _reply(self, asked: _Asked) -> tuple[int, object]:
        routes = {
            "/v1/state": ("GET", self._state),
            "/v1/drain": ("POST", lambda _: self._operator.drain(on=True)),
            "/v1/undrain": ("POST", lambda _: self._operator.drain(on=False)),
            "/v1/release": ("POST", self._release),
        }
        route = routes.get(asked.path)
        if route is None:
            return 404, _Error(f"{asked.path}: there is {', '.join(routes)}")
        method, answer = route
        if asked.method != method:
            return 405, _Error(f"{asked.path} is asked with {method}, not {asked.method}")
        found = answer(asked)
        if isinstance(found, Refusal):
            return found.status, _Error(found.error)
        return 200, found

    def _state(self, asked: _Asked) -> object:
        text = asked.query.get("most", [str(LISTED)])[-1]
        if not (text.isascii() and text.isdigit() and len(text) < 9):
            return Refusal(400, f"most = {text[:80]!r}: expected a number of entries")
        return self._operator.state(min(int(text), LISTED_MOST))

    def _release(self, asked: _Asked) -> object:
        try:
            order = msgspec.json.decode(asked.body, type=ReleaseOrder)
        except msgspec.MsgspecError as error:
            return Refusal(400, f"this is no order to release: {error}")
        return self._operator.release(order)


@frozen
class _Error:
    error: str


async def _read(stream: anyio.abc.ByteStream, connection: h11.Connection) -> _Asked:
    """One request, whole.

    Raises:
        h11.RemoteProtocolError: What came is none, or too long.
    """
    request: h11.Request | None = None
    body = b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            try:
                connection.receive_data(await stream.receive(READ_BYTES))
            except anyio.EndOfStream:
                connection.receive_data(b"")
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
            if len(body) > BODY_BYTES_MOST:
                raise h11.RemoteProtocolError("its body is too long", error_status_hint=413)
        elif isinstance(event, h11.EndOfMessage) and request is not None:
            parts = urlsplit(request.target.decode("ascii"))
            method = request.method.decode("ascii")
            return _Asked(method, parts.path, parse_qs(parts.query, max_num_fields=8), body)
        else:
            raise anyio.EndOfStream


def _answers(path: Path) -> bool:
    """Whether somebody listens there: a socket that is left over may be replaced."""
    with socket.socket(socket.AF_UNIX) as trial:
        trial.setblocking(False)
        try:
            trial.connect(os.fspath(path))
        except BlockingIOError:  # many wait there already
            return True
        except OSError:
            return False
    return True

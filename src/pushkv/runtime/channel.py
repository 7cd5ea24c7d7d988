"""The control channel: one TCP connection per link, framed messages, nothing else.

A connection harms only itself: garbage, silence before HELLO, a full queue towards a peer that does
not read, all end in its closing, which is reported like any other end.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import secrets
import socket
from collections.abc import Callable

import anyio
import anyio.abc
from attrs import define, field

from pushkv.core.effects import ProducerAddress
from pushkv.core.errors import ConfigurationError, RemoteProtocolError
from pushkv.core.events import ConnectionClosed, ConnectionOpened, Event, MessageReceived
from pushkv.core.messages import Hello, Message
from pushkv.wire import Decoder, Malformed, frame

__all__ = ["Channel", "is_loopback"]

log = logging.getLogger("pushkv.channel")

CONNECTIONS_MOST = 4096
QUEUED_MESSAGES_MOST = 65_536
DIAL_S = 5.0
HELLO_S = 10.0
READ_BYTES = 65_536


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@define(eq=False)
class _Connection:
    number: int
    stream: anyio.abc.SocketStream
    dialed: ProducerAddress | None
    outbox: anyio.abc.ObjectSendStream[bytes]
    inbox: anyio.abc.ObjectReceiveStream[bytes]
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)
    greeted: bool = False
    cause: str = ""


class Channel:
    """All control connections of one endpoint, in one event loop.

    Args:
        deliver: Called in the loop with each event; must not block.
        count: Called with the cause of whatever was dropped (I5).
    """

    def __init__(
        self,
        deliver: Callable[[Event], None],
        count: Callable[[str, str], None],
    ) -> None:
        self._deliver = deliver
        self._count = count
        self._connections: dict[int, _Connection] = {}
        self._numbers = itertools.count(1)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._listener: anyio.abc.Listener[anyio.abc.SocketStream] | None = None

    async def listen(self, host: str, port: int, tasks: anyio.abc.TaskGroup) -> int:
        """Accept connections in `tasks`; returns the port.

        Raises:
            ConfigurationError: The address cannot be listened on.
        """
        self._tasks = tasks
        try:
            multi = await anyio.create_tcp_listener(local_host=host, local_port=port)
        except OSError as error:
            raise ConfigurationError(
                "listen", f"{host}:{port}", f"an address to listen on ({error})"
            ) from error
        listener, *others = multi.listeners
        for other in others:
            await other.aclose()
        self._listener = listener
        tasks.start_soon(self._serve, listener, tasks)
        return int(listener.extra(anyio.abc.SocketAttribute.local_port))  # noqa: S610 (not Django)

    async def _serve(
        self,
        listener: anyio.abc.Listener[anyio.abc.SocketStream],
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        try:
            await listener.serve(self._accepted, tasks)
        except anyio.ClosedResourceError:
            return

    async def _accepted(self, stream: anyio.abc.SocketStream) -> None:
        if len(self._connections) >= CONNECTIONS_MOST:
            self._count("too_many_connections", "")
            await stream.aclose()
            return
        await self._run(stream, None)

    def dial(self, address: ProducerAddress) -> None:
        """Connect to `address`; its events say how that went."""
        assert self._tasks is not None, "listen first"
        self._tasks.start_soon(self._dial, address)

    async def _dial(self, address: ProducerAddress) -> None:
        try:
            with anyio.fail_after(DIAL_S):
                stream = await anyio.connect_tcp(address.host, address.port)
        except (OSError, TimeoutError) as error:
            cause = str(error) or "no answer"
            self._deliver(ConnectionClosed(None, address, cause))
            return
        await self._run(stream, address)

    def send(self, number: int, message: Message) -> None:
        """Queue a message; a connection whose queue is full is closed."""
        connection = self._connections.get(number)
        if connection is None:
            self._count("no_connection", type(message).__name__)
            return
        try:
            connection.outbox.send_nowait(frame(message))  # type: ignore[attr-defined]
        except ConfigurationError as error:
            log.error("%s cannot be sent: %s", type(message).__name__, error)
            self._count("unsendable_message", str(error))
        except anyio.WouldBlock:
            self._count("channel_full", type(message).__name__)
            self.hang_up(number)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._count("no_connection", type(message).__name__)

    def hang_up(self, number: int) -> None:
        """Close a connection once what is queued for it has left, or soon."""
        connection = self._connections.get(number)
        if connection is not None:
            connection.outbox.close()  # type: ignore[attr-defined]
            connection.scope.deadline = min(connection.scope.deadline, anyio.current_time() + 1.0)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._listener is not None:
            await self._listener.aclose()
        for connection in list(self._connections.values()):
            connection.scope.cancel()

    # -- one connection

    async def _run(self, stream: anyio.abc.SocketStream, dialed: ProducerAddress | None) -> None:
        raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)  # noqa: S610 (not Django)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outbox, inbox = anyio.create_memory_object_stream[bytes](QUEUED_MESSAGES_MOST)
        connection = _Connection(next(self._numbers), stream, dialed, outbox, inbox)
        self._connections[connection.number] = connection
        self._deliver(ConnectionOpened(connection.number, secrets.randbits(64), dialed))
        try:
            with connection.scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._write, connection)
                    tasks.start_soon(self._expect_hello, connection)
                    await self._read(connection)
                    tasks.cancel_scope.cancel()
        finally:
            del self._connections[connection.number]
            outbox.close()
            inbox.close()
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)
            closed = ConnectionClosed(connection.number, dialed, connection.cause)
            self._deliver(closed)

    async def _expect_hello(self, connection: _Connection) -> None:
        await anyio.sleep(HELLO_S)
        if not connection.greeted:
            connection.cause = f"no HELLO within {HELLO_S:g} s"
            self._count("no_hello", "")
            connection.scope.cancel()

    async def _read(self, connection: _Connection) -> None:
        decoder = Decoder()
        try:
            while True:
                data = await connection.stream.receive(READ_BYTES)
                for item in decoder.feed(data):
                    self._take(connection, item)
        except RemoteProtocolError as error:
            connection.cause = str(error)
            self._count("broken_frame", str(error))
        except anyio.EndOfStream:
            connection.cause = connection.cause or "closed by the peer"
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
            connection.cause = connection.cause or str(error) or type(error).__name__

    def _take(self, connection: _Connection, item: Message | Malformed) -> None:
        if isinstance(item, Malformed):
            self._count("malformed_message", f"{item.field} = {item.value!r}: {item.expected}")
            return
        connection.greeted = connection.greeted or isinstance(item, Hello)
        self._deliver(MessageReceived(connection.number, item))

    async def _write(self, connection: _Connection) -> None:
        try:
            async for data in connection.inbox:
                await connection.stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass
        connection.scope.cancel()

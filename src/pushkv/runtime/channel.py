"""The control channel: one TCP connection per link, framed messages, nothing else.

A connection harms only itself: garbage, silence before HELLO, a full queue towards a peer that does
not read, all end in its closing, which is reported like any other end.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import math
import secrets
from collections.abc import Callable

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from attrs import define, field

from pushkv.core.effects import ProducerAddress
from pushkv.core.errors import ConfigurationError, RemoteProtocolError
from pushkv.core.events import ConnectionClosed, ConnectionOpened, Event, MessageReceived
from pushkv.core.messages import Hello, Message
from pushkv.wire import Decoder, Malformed, frame

__all__ = ["Channel", "is_loopback"]

log = logging.getLogger("pushkv.channel")

READ_BYTES = 65_536
FLUSH_S = 1.0
"""How long what is queued for a connection that is to be closed may take to leave."""
ACCEPT_AGAIN_S = 0.1
"""After a connection that could not be accepted: the cause, such as EMFILE, may last."""


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _innermost(error: BaseException) -> str:
    """What began it, of an error that connecting wrapped."""
    inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
    if inner is not None:
        return _innermost(inner)
    return str(error) or type(error).__name__


@define(eq=False)
class _Connection:
    number: int
    stream: anyio.abc.SocketStream
    dialed: ProducerAddress | None
    outbox: MemoryObjectSendStream[bytes]
    inbox: MemoryObjectReceiveStream[bytes]
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)
    over: anyio.Event = field(factory=anyio.Event)
    queued_bytes: int = 0
    greeted: bool = False
    cause: str = ""


class Channel:
    """All control connections of one endpoint, in one event loop.

    Args:
        deliver: Called in the loop with each event; must not block.
        count: Called with the cause of whatever was dropped (I5).
        dial_s: How long connecting may take, in seconds.
        hello_s: How long a connection may live without a HELLO from the peer, in seconds.
        connections_most: Accepted while there are fewer; more are closed at once.
        queued_bytes_most: A peer that reads too slowly for this many bytes is hung up on.
    """

    def __init__(
        self,
        deliver: Callable[[Event], None],
        count: Callable[[str, str], None],
        *,
        dial_s: float = 5.0,
        hello_s: float = 10.0,
        connections_most: int = 4096,
        queued_bytes_most: int = 64 * 1024 * 1024,
    ) -> None:
        self._deliver = deliver
        self._count = count
        self._dial_s = dial_s
        self._hello_s = hello_s
        self._connections_most = connections_most
        self._queued_bytes_most = queued_bytes_most
        self._connections: dict[int, _Connection] = {}
        self._numbers = itertools.count(1)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._listener: anyio.abc.Listener[anyio.abc.SocketStream] | None = None

    async def listen(self, host: str, port: int) -> int:
        """Bind and listen; connections wait for `serve`. Returns the port.

        Raises:
            ConfigurationError: The address cannot be listened on.
        """
        try:
            multi = await anyio.create_tcp_listener(local_host=host, local_port=port)
        except (OSError, ValueError) as error:  # ValueError: no name that DNS could hold
            raise ConfigurationError(
                "listen", f"{host}:{port}", f"an address to listen on ({error})"
            ) from error
        listener, *others = multi.listeners
        for other in others:
            await other.aclose()
        self._listener = listener
        return int(listener.extra(anyio.abc.SocketAttribute.local_port))  # noqa: S610 (not Django)

    def serve(self, tasks: anyio.abc.TaskGroup) -> None:
        """Accept connections, and dial, in `tasks`."""
        assert self._listener is not None, "listen first"
        self._tasks = tasks
        tasks.start_soon(self._serve, self._listener, tasks)

    async def _serve(
        self,
        listener: anyio.abc.Listener[anyio.abc.SocketStream],
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        while True:
            try:
                await listener.serve(self._accepted, tasks)
            except anyio.ClosedResourceError:
                return
            except OSError as error:
                self._count("accept_failed", str(error))
                await anyio.sleep(ACCEPT_AGAIN_S)

    async def _accepted(self, stream: anyio.abc.SocketStream) -> None:
        if len(self._connections) >= self._connections_most:
            self._count("too_many_connections", f"more than {self._connections_most}")
            await anyio.aclose_forcefully(stream)
            return
        await self._run(stream, None)

    def dial(self, address: ProducerAddress) -> None:
        """Connect to `address`; its events say how that went."""
        assert self._tasks is not None, "serve first"
        self._tasks.start_soon(self._dial, address)

    async def _dial(self, address: ProducerAddress) -> None:
        try:
            with anyio.fail_after(self._dial_s):
                stream = await anyio.connect_tcp(address.host, address.port)
        except TimeoutError:
            cause = f"no answer within {self._dial_s:g} s"
            self._deliver(ConnectionClosed(None, address, cause))
            return
        except Exception as error:  # noqa: BLE001 - whoever sent the request chose the address
            self._deliver(ConnectionClosed(None, address, _innermost(error)))
            return
        await self._run(stream, address)

    def send(self, number: int, message: Message) -> None:
        """Queue a message; a connection whose queue is full is closed."""
        connection = self._connections.get(number)
        if connection is None:
            self._count("no_connection", type(message).__name__)
            return
        try:
            data = frame(message)
            connection.outbox.send_nowait(data)
        except ConfigurationError as error:
            log.error("%s cannot be sent: %s", type(message).__name__, error)
            self._count("unsendable_message", str(error))
            return
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._count("no_connection", type(message).__name__)
            return
        connection.queued_bytes += len(data)
        if connection.queued_bytes > self._queued_bytes_most:
            self._count("channel_full", type(message).__name__)
            connection.cause = f"{connection.queued_bytes} bytes wait for a peer that does not read"
            connection.scope.cancel()

    def hang_up(self, number: int, flush_s: float = FLUSH_S) -> None:
        """Close a connection once what is queued for it has left, or after `flush_s` seconds."""
        connection = self._connections.get(number)
        if connection is not None:
            connection.outbox.close()
            until = anyio.current_time() + flush_s
            connection.scope.deadline = min(connection.scope.deadline, until)

    async def close(self, flush_s: float = FLUSH_S) -> None:
        """Stop listening, hang up on everybody, and wait until all connections are gone.

        What is queued still leaves: a verdict that does not would cost the peer its blocks.
        """
        if self._listener is not None:
            await self._listener.aclose()
        for number in self._connections:
            self.hang_up(number, flush_s)
        with anyio.move_on_after(2 * flush_s):
            for connection in list(self._connections.values()):
                await connection.over.wait()

    # -- one connection

    async def _run(self, stream: anyio.abc.SocketStream, dialed: ProducerAddress | None) -> None:
        """A connection's life; nothing that happens to it ends another."""
        outbox, inbox = anyio.create_memory_object_stream[bytes](math.inf)
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
        except Exception as error:
            connection.cause = repr(error)
            self._count("connection_broke", repr(error))
            log.exception("a control connection broke")
        finally:
            del self._connections[connection.number]
            outbox.close()
            inbox.close()
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)
            connection.over.set()
            closed = ConnectionClosed(connection.number, dialed, connection.cause)
            self._deliver(closed)

    async def _expect_hello(self, connection: _Connection) -> None:
        await anyio.sleep(self._hello_s)
        if not connection.greeted:
            connection.cause = f"no HELLO within {self._hello_s:g} s"
            self._count("no_hello", connection.cause)
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
                connection.queued_bytes -= len(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass
        connection.scope.cancel()

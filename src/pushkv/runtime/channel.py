"""The control channel: one connection per link, authenticated, framed messages, nothing else.

With credentials every connection is mutual TLS 1.3 before a byte of ours leaves, and a peer may
only be an engine that its certificate allows. Without, peers are reached on this machine alone,
unless somebody said that plaintext will do.

A connection harms only itself: garbage, silence before HELLO, a flood of messages, a full queue
towards a peer that does not read, all end in its closing or slow it alone, and are counted by
cause. `Limits` says how much there may be of everything.

Nobody new is let in, or dialled, with the last file descriptors: what the peer's transport would
then open in vain is not always opened again. Over TCP, UCX stops listening for good once it could
not accept.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections.abc import Callable

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from anyio.streams.tls import TLSAttribute, TLSStream
from attrs import define, field

from pushkv.core.effects import ProducerAddress
from pushkv.core.errors import ConfigurationError, RemoteProtocolError
from pushkv.core.events import ConnectionClosed, ConnectionOpened, Event, MessageReceived
from pushkv.core.ids import EngineId
from pushkv.core.messages import Hello, Message, Refused
from pushkv.wire import FRAME_BYTES_MOST, PROTOCOL, Decoder, Malformed, frame

from .addresses import innermost, is_loopback, neighbourhood, remote
from .admission import Admission, Allowance, Limits
from .credentials import Tls, engines_named
from .descriptors import expect_descriptors
from .network import Network, TcpNetwork

__all__ = ["Channel"]

log: logging.Logger = logging.getLogger("pushkv.channel")

READ_BYTES = 65_536
FLUSH_S = 1.0
"""How long what is queued for a connection that is to be closed may take to leave."""
ACCEPT_AGAIN_S = 0.1
"""After a connection that could not be accepted: the cause, such as EMFILE, may last."""
UNREAD_S = 1.0
"""A full queue is the peer's fault when nothing has left it for so long. Without this, who comes
back after a pause, and has much to say at once, would be cut off by it again and again."""
SHOWN_LENGTH_MOST = 200
"""Characters of what a REFUSED of ours says of a stranger's value."""


@define(eq=False)
class _Connection:
    """One connection, from the moment it was accepted or dialled."""

    number: int
    stream: anyio.abc.ByteStream
    dialed: ProducerAddress | None
    allowance: Allowance
    outbox: MemoryObjectSendStream[bytes]
    inbox: MemoryObjectReceiveStream[bytes]
    protocol: int
    named: frozenset[EngineId] = frozenset()
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)
    over: anyio.Event = field(factory=anyio.Event)
    queued_bytes: int = 0
    moved_s: float = 0.0
    opened: bool = False
    greeted: bool = False
    deaf: bool = False
    cause: str = ""

    def end(self, cause: str) -> None:
        """Close it now, for the first cause that was given."""
        self.cause = self.cause or cause
        self.scope.cancel()


class Channel:
    """All control connections of one endpoint, in one event loop.

    Args:
        deliver: Called in the loop with each event; must not block.
        count: Called with the cause of whatever was dropped (I5).
        limits: How much there may be of everything.
        tls: Our credentials; None for plaintext.
        plaintext: Dial beyond this machine without credentials, too.
        network: Makes the connections; TCP by default.
        random_bytes: So many random bytes, for nonces.
        protocol: The newest that is spoken here; a peer that speaks the one before is answered so.
    """

    def __init__(
        self,
        deliver: Callable[[Event], None],
        count: Callable[[str, str], None],
        limits: Limits | None = None,
        tls: Tls | None = None,
        *,
        plaintext: bool = False,
        network: Network | None = None,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        protocol: int = PROTOCOL,
    ) -> None:
        self._protocol = protocol
        self._deliver = deliver
        self._count = count
        self._limits = limits or Limits()
        self._tls = tls
        self._plaintext = plaintext
        self._network = network or TcpNetwork()
        self._random_bytes = random_bytes
        self.hello_bytes_most: int = self._limits.hello_bytes_most or FRAME_BYTES_MOST
        """The longest frame before a HELLO."""
        self._admission = Admission(self._limits)
        self._connections: dict[int, _Connection] = {}
        self._queued_bytes = 0
        self._numbers = itertools.count(1)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._listener: anyio.abc.Listener[anyio.abc.ByteStream] | None = None

    async def listen(self, host: str, port: int) -> int:
        """Bind and listen; connections wait for `serve`. Returns the port.

        Raises:
            ConfigurationError: The address cannot be listened on.
        """
        try:
            self._listener, port = await self._network.listen(host, port)
        except (OSError, ValueError) as error:  # ValueError: no name that DNS could hold
            raise ConfigurationError(
                "listen", f"{host}:{port}", f"an address to listen on ({error})"
            ) from error
        return port

    def serve(self, tasks: anyio.abc.TaskGroup) -> None:
        """Accept connections, and dial, in `tasks`."""
        assert self._listener is not None, "listen first"
        self._tasks = tasks
        tasks.start_soon(self._serve, self._listener, tasks)

    def dial(self, address: ProducerAddress) -> None:
        """Connect to `address`; its events say how that went."""
        assert self._tasks is not None, "serve first"
        self._tasks.start_soon(self._dial, address)

    def send(self, number: int, message: Message) -> None:
        """Queue a message; a connection whose queue is full, and does not move, is closed."""
        connection = self._connections.get(number)
        if connection is None or connection.deaf or connection.scope.cancel_called:
            self._count("no_connection", type(message).__name__)
            return
        try:
            data = frame(message, connection.protocol)
            connection.outbox.send_nowait(data)
        except ConfigurationError as error:
            log.error("%s cannot be sent: %s", type(message).__name__, error)
            self._count("unsendable_message", str(error))
            return
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._count("no_connection", type(message).__name__)
            return
        if connection.queued_bytes == 0:
            connection.moved_s = anyio.current_time()
        connection.queued_bytes += len(data)
        self._queued_bytes += len(data)
        full = connection.queued_bytes > self._limits.queued_bytes_most
        if full and anyio.current_time() - connection.moved_s >= UNREAD_S:
            self._count("channel_full", type(message).__name__)
            connection.end(f"{connection.queued_bytes} bytes wait for a peer that does not read")
        elif self._queued_bytes > self._limits.queued_bytes_in_all_most:
            slowest = max(self._connections.values(), key=lambda each: each.queued_bytes)
            self._count("channels_full", f"{self._queued_bytes} bytes wait for all peers")
            slowest.end(f"{slowest.queued_bytes} bytes wait for it, the most of all peers")

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

    # -- how connections come about

    async def _serve(
        self,
        listener: anyio.abc.Listener[anyio.abc.ByteStream],
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

    async def _accepted(self, stream: anyio.abc.ByteStream) -> None:
        place = neighbourhood(remote(stream))
        if not self._may_be_more(place):
            await anyio.aclose_forcefully(stream)
            return
        full = self._admission.full(place)
        if full:
            self._count("too_many_connections", full)
            await anyio.aclose_forcefully(stream)
            return
        connection = self._connection(stream, None)
        for number in self._admission.enter(connection.number, place):
            self._count("stranger_dropped", f"of {place} or another, for one of {place}")
            self._connections[number].end("a newer connection took its place")
        await self._run(connection)

    def _may_be_more(self, place: str) -> bool:
        try:
            expect_descriptors()
        except OSError as error:
            self._count("no_descriptors", f"for {place}: {error}")
            return False
        return True

    async def _dial(self, address: ProducerAddress) -> None:
        limit_s = self._limits.dial_s
        try:
            with anyio.fail_after(limit_s):
                stream, named = await self._reach(address)
        except TimeoutError:
            cause = f"no answer within {limit_s:g} s"
        except Exception as error:  # noqa: BLE001 - whoever sent the request chose the address
            cause = innermost(error)
        else:
            connection = self._connection(stream, address)
            connection.named = named
            await self._run(connection)
            return
        if self._tls is not None:
            self._count("dial_failed", f"{address.host}:{address.port}: {cause}")
        self._deliver(ConnectionClosed(None, address, cause))

    async def _reach(
        self, address: ProducerAddress
    ) -> tuple[anyio.abc.ByteStream, frozenset[EngineId]]:
        """A connection to `address` on which whatever is said stays between the two of us."""
        if not self._may_be_more(f"{address.host}:{address.port}"):
            raise ConnectionRefusedError("too few file descriptors are left here")
        stream = await self._network.connect(address.host, address.port)
        try:
            if self._tls is not None:
                return await self._secured(stream, self._tls, server_side=False)
            if not self._plaintext and not is_loopback(remote(stream)):
                self._count("plaintext_refused", f"{address.host}:{address.port}")
                raise ConnectionRefusedError(
                    f"{address.host} is another machine, and this control channel is plaintext"
                )
        except BaseException:
            await anyio.aclose_forcefully(stream)
            raise
        return stream, frozenset()

    async def _secured(
        self, stream: anyio.abc.ByteStream, tls: Tls, *, server_side: bool
    ) -> tuple[anyio.abc.ByteStream, frozenset[EngineId]]:
        """`stream` with TLS in it, and the engines that the peer's certificate names."""
        secure = await TLSStream.wrap(
            stream,
            server_side=server_side,
            ssl_context=tls.server() if server_side else tls.client(),
            standard_compatible=False,  # frames say where they end
        )
        certificate = secure.extra(TLSAttribute.peer_certificate)  # noqa: S610 (not Django)
        return secure, engines_named(certificate)

    def _connection(
        self, stream: anyio.abc.ByteStream, dialed: ProducerAddress | None
    ) -> _Connection:
        limits = self._limits
        outbox, inbox = anyio.create_memory_object_stream[bytes](math.inf)
        allowance = Allowance(limits.messages_per_s, limits.messages_at_once)
        connection = _Connection(
            next(self._numbers), stream, dialed, allowance, outbox, inbox, self._protocol
        )
        self._connections[connection.number] = connection
        return connection

    # -- one connection

    async def _run(self, connection: _Connection) -> None:
        """A connection's life; nothing that happens to it ends another."""
        try:
            with connection.scope:
                if connection.dialed is not None or await self._shook_hands(connection):
                    await self._talk(connection)
        except Exception as error:
            connection.cause = repr(error)
            self._count("connection_broke", repr(error))
            log.exception("a control connection broke")
        finally:
            del self._connections[connection.number]
            self._admission.leave(connection.number)
            self._queued_bytes -= connection.queued_bytes
            connection.outbox.close()
            connection.inbox.close()
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(connection.stream)
            connection.over.set()
            if connection.opened:
                self._deliver(
                    ConnectionClosed(connection.number, connection.dialed, connection.cause)
                )

    async def _shook_hands(self, connection: _Connection) -> bool:
        """Whether who connected to us may go on; in plaintext everybody may."""
        if self._tls is None:
            return True
        limit_s = self._limits.handshake_s
        try:
            with anyio.fail_after(limit_s):
                connection.stream, connection.named = await self._secured(
                    connection.stream, self._tls, server_side=True
                )
        except TimeoutError:
            self._count("tls_failed", f"not over within {limit_s:g} s")
            return False
        except (anyio.EndOfStream, anyio.BrokenResourceError, OSError) as error:
            self._count("tls_failed", innermost(error))
            return False
        return True

    async def _talk(self, connection: _Connection) -> None:
        connection.opened = True
        nonce = int.from_bytes(self._random_bytes(8), "big")
        self._deliver(ConnectionOpened(connection.number, nonce, connection.dialed))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write, connection)
            tasks.start_soon(self._expect_hello, connection)
            await self._read(connection)
            tasks.cancel_scope.cancel()

    async def _expect_hello(self, connection: _Connection) -> None:
        await anyio.sleep(self._limits.hello_s)
        if not connection.greeted:
            cause = f"no HELLO within {self._limits.hello_s:g} s"
            self._count("no_hello", cause)
            connection.end(cause)

    async def _read(self, connection: _Connection) -> None:
        decoder = Decoder(self.hello_bytes_most)
        try:
            while True:
                data = await connection.stream.receive(READ_BYTES)
                items = decoder.feed(data)
                for item in items:
                    self._take(connection, item)
                pause_s = connection.allowance.spend(len(items), anyio.current_time())
                if pause_s:
                    self._count("too_many_messages", f"more than {connection.allowance.per_s}/s")
                    await anyio.sleep(pause_s)
        except RemoteProtocolError as error:
            connection.cause = str(error)
            self._count("broken_frame", str(error))
        except anyio.EndOfStream:
            unheard = self._tls is not None and not connection.greeted
            hint = ", before its HELLO: does it accept our certificate?" if unheard else ""
            connection.cause = connection.cause or f"closed by the peer{hint}"
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
            connection.cause = connection.cause or innermost(error)

    def _take(self, connection: _Connection, item: Message | Malformed) -> None:
        if connection.deaf:
            return
        if not connection.greeted and not self._is_greeting(connection, item):
            return
        if isinstance(item, Malformed):
            self._count("malformed_message", f"{item.field} = {item.value!r}: {item.expected}")
            return
        self._deliver(MessageReceived(connection.number, item))

    def _is_greeting(self, connection: _Connection, item: Message | Malformed) -> bool:
        """Whether a first message may pass: HELLO under a name that is the peer's, or REFUSED."""
        if isinstance(item, Refused):
            return True
        if isinstance(item, Malformed):
            detail = f"{item.field} = {item.value!r}: {item.expected}"
            self._turn_away(connection, "malformed_hello", detail, item.field, item.expected)
            return False
        if not isinstance(item, Hello):
            kind = type(item).__name__
            self._turn_away(connection, "message_before_hello", kind, "message", "HELLO")
            return False
        if self._tls is not None and not self._tls.may_be(item.engine, connection.named):
            named = ", ".join(sorted(connection.named)) or "no engine"
            detail = f"{item.engine}, with a certificate that names {named}"
            self._turn_away(connection, "wrong_identity", detail, "engine", named)
            return False
        connection.greeted = True
        connection.protocol = min(self._protocol, item.protocol)
        self._admission.greeted(connection.number)
        return True

    def _turn_away(
        self, connection: _Connection, cause: str, detail: str, name: str, expected: str
    ) -> None:
        """Say why, listen no more, and close."""
        self._count(cause, detail)
        connection.cause = f"{cause}: {detail}"
        shown = detail[:SHOWN_LENGTH_MOST]
        refused = Refused(
            name[:SHOWN_LENGTH_MOST] or "message", expected[:SHOWN_LENGTH_MOST], shown
        )
        self.send(connection.number, refused)
        connection.deaf = True
        self.hang_up(connection.number)

    async def _write(self, connection: _Connection) -> None:
        try:
            async for data in connection.inbox:
                await connection.stream.send(data)
                connection.moved_s = anyio.current_time()
                connection.queued_bytes -= len(data)
                self._queued_bytes -= len(data)
        except (
            anyio.BrokenResourceError,
            anyio.ClosedResourceError,
            anyio.EndOfStream,  # what a TLS stream says whose peer is gone
            OSError,
        ):
            pass
        connection.scope.cancel()

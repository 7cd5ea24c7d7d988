"""Faults of the control channel: a proxy of real sockets that knows where frames begin.

It listens in place of an endpoint and passes everything on to it, frame by frame. A test watches
the frames, says which of them are held, dropped, delayed or sent twice, adds its own, slows a
direction down or stops it, and cuts connections at one end or at both.

Within a connection and a direction frames keep their order, as in TCP: behind one that is held all
others wait. Frames of *different* connections are reordered by holding one and letting the next
connection pass; a frame that is dropped is one that its sender never got to hand over.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Self

import anyio
import anyio.abc
from attrs import define, field, frozen

from pushkv.core.effects import ProducerAddress
from pushkv.core.ids import AttemptId
from pushkv.core.messages import AttemptMessage, Message
from pushkv.wire import Decoder, Malformed, frame

__all__ = ["Act", "ChannelFaults", "Relay", "Rule", "Seen", "Toward"]

READ_BYTES = 65_536
LENGTH_BYTES = 4


class Toward(Enum):
    """A direction, by the end that hears. A consumer dials, a producer listens."""

    PRODUCER = "to the end that listens"
    CONSUMER = "to the end that dialled"


class Act(Enum):
    """What becomes of a frame."""

    PASS = "passes"  # noqa: S105 - no password
    DROP = "is dropped"
    HOLD = "waits, and whatever follows it waits, until its rule is lifted"
    TWICE = "is passed on twice"


@frozen(eq=False)
class Seen:
    """A frame that came by: its connection, its direction, its bytes, and what they mean."""

    relay: Relay
    toward: Toward
    data: bytes
    message: Message | Malformed | None

    @property
    def attempt(self) -> AttemptId | None:
        """The attempt that it is about; None for what is about a link, or nothing."""
        return self.message.attempt if isinstance(self.message, AttemptMessage) else None


@define(eq=False)
class Rule:
    """What becomes of the frames of one kind; made by `ChannelFaults.rule`.

    Attributes:
        seen: The frames that it has met, oldest first.
    """

    kinds: tuple[type, ...]
    toward: Toward | None
    act: Act
    delay_s: float
    times: int | None
    where: Callable[[Seen], bool] | None
    seen: list[Seen] = field(factory=list)
    _over: anyio.Event = field(factory=anyio.Event)

    @property
    def is_over(self) -> bool:
        """Whether it was lifted, or has met as many frames as it may."""
        return self._over.is_set() or (self.times is not None and len(self.seen) >= self.times)

    def lift(self) -> None:
        """It meets no further frame, and what it holds goes on."""
        self._over.set()

    async def lifted(self) -> None:
        """Until `lift` is called."""
        await self._over.wait()

    def _meets(self, seen: Seen) -> bool:
        return (
            not self.is_over
            and self.toward in (None, seen.toward)
            and (not self.kinds or isinstance(seen.message, self.kinds))
            and (self.where is None or self.where(seen))
        )


@define(eq=False)
class Relay:
    """One connection through the proxy: a socket at each end."""

    dialer: anyio.abc.SocketStream
    listener: anyio.abc.SocketStream
    over: anyio.Event = field(factory=anyio.Event)
    _locks: dict[Toward, anyio.Lock] = field(
        factory=lambda: {each: anyio.Lock() for each in Toward}
    )

    async def send(self, data: bytes, toward: Toward) -> None:
        """Hand bytes to one end; an end that is gone hears nothing."""
        stream = self.listener if toward is Toward.PRODUCER else self.dialer
        async with self._locks[toward]:
            try:
                await stream.send(data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return

    async def cut(self, toward: Toward | None = None) -> None:
        """Close the socket of one end, or of both: that end hears of it, and nobody else."""
        if toward in (None, Toward.PRODUCER):
            await anyio.aclose_forcefully(self.listener)
        if toward in (None, Toward.CONSUMER):
            await anyio.aclose_forcefully(self.dialer)


class ChannelFaults:
    """A proxy in front of one endpoint's control channel. Used as an async context.

    All of it belongs to the event loop that entered the context; it leaves no task and no socket
    behind. The endpoint behind it may stop and come back.

    Args:
        target: Where the endpoint listens.
        buffer_bytes: What the proxy's sockets keep of what they have not read, about; 0 for what
            the system gives. With little, a direction that is stopped is soon full.

    Attributes:
        relays: Every connection so far, oldest first.
        frames: Every frame so far, oldest first.
        deaf: While true, an end that closes its socket is not heard of at the other, until `cut`.
        refuses: While true, new connections are closed at once.
        mute: While true, new connections are taken and lead nowhere.
        bytes_per_s: How fast bytes pass in each direction.
    """

    def __init__(self, target: ProducerAddress, buffer_bytes: int = 0) -> None:
        self.target = target
        self._buffer_bytes = buffer_bytes
        self.relays: list[Relay] = []
        self.frames: list[Seen] = []
        self.deaf = self.refuses = self.mute = False
        self.bytes_per_s: dict[Toward, float] = dict.fromkeys(Toward, math.inf)
        self._rules: list[Rule] = []
        self._stopped: dict[Toward, anyio.Event] = {}
        self._port = 0

    async def __aenter__(self) -> Self:
        listeners = await anyio.create_tcp_listener(local_host="127.0.0.1")
        self._port = int(listeners.extra(anyio.abc.SocketAttribute.local_port))  # noqa: S610
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._listener = listeners
        for listener in listeners.listeners:
            self._narrow(listener)  # which its connections inherit
        self._tasks.start_soon(listeners.serve, self._accepted)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)
        with anyio.CancelScope(shield=True):
            await self._listener.aclose()
            for relay in self.relays:
                await relay.cut()

    @property
    def address(self) -> ProducerAddress:
        """Where to dial instead of the endpoint."""
        return ProducerAddress("127.0.0.1", self._port, self.target.rank, self.target.engine)

    @property
    def relay(self) -> Relay:
        """The newest connection.

        Raises:
            LookupError: Nobody has dialled yet.
        """
        if not self.relays:
            raise LookupError("nobody has dialled this proxy")
        return self.relays[-1]

    # -- what a test says

    def rule(
        self,
        *kinds: type,
        toward: Toward | None = None,
        act: Act = Act.PASS,
        delay_s: float = 0,
        times: int | None = None,
        where: Callable[[Seen], bool] | None = None,
    ) -> Rule:
        """From now on frames of these messages meet this; the newest rule that meets one decides.

        Args:
            kinds: Message classes, `Malformed`, or none for every frame.
            toward: One direction only.
            act: What becomes of each.
            delay_s: For how long each waits first, in seconds, and whatever follows it.
            times: How many frames it meets at most.
            where: A further condition.
        """
        rule = Rule(kinds, toward, act, delay_s, times, where)
        self._rules.append(rule)
        return rule

    async def inject(
        self, message: Message | bytes, toward: Toward, relay: Relay | None = None
    ) -> None:
        """Send a frame of our own, or any bytes, over the newest connection or another."""
        data = message if isinstance(message, bytes) else frame(message)
        await (relay or self.relay).send(data, toward)

    def stop(self, toward: Toward) -> None:
        """Pass nothing on in this direction and read nothing: what is sent piles up (TCP's way)."""
        self._stopped.setdefault(toward, anyio.Event())

    def go_on(self, toward: Toward) -> None:
        """End `stop`."""
        event = self._stopped.pop(toward, None)
        if event is not None:
            event.set()

    async def cut(self, toward: Toward | None = None) -> None:
        """Cut every connection, at one end or at both."""
        for relay in self.relays:
            await relay.cut(toward)

    async def passed(self, *kinds: type, toward: Toward | None = None, count: int = 1) -> Seen:
        """Until so many frames of these messages have come by since the beginning; the last."""
        while True:
            found = [
                each
                for each in self.frames
                if isinstance(each.message, kinds) and toward in (None, each.toward)
            ]
            if len(found) >= count:
                return found[count - 1]
            await anyio.sleep(0.001)

    # -- inside

    async def _accepted(self, dialer: anyio.abc.SocketStream) -> None:
        async with dialer:
            if self.refuses:
                return
            if self.mute:
                await self._drain(dialer)
                return
            try:
                listener = await anyio.connect_tcp(self.target.host, self.target.port)
            except OSError:
                return
            self._narrow(listener)
            relay = Relay(dialer, listener)
            self.relays.append(relay)
            async with listener, anyio.create_task_group() as tasks:
                tasks.start_soon(self._pump, relay, Toward.PRODUCER, tasks.cancel_scope)
                tasks.start_soon(self._pump, relay, Toward.CONSUMER, tasks.cancel_scope)
            relay.over.set()

    def _narrow(self, end: anyio.TypedAttributeProvider) -> None:
        if self._buffer_bytes:
            raw = end.extra(anyio.abc.SocketAttribute.raw_socket)  # noqa: S610 (not Django)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)

    async def _drain(self, stream: anyio.abc.SocketStream) -> None:
        try:
            while True:
                await stream.receive(READ_BYTES)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return

    async def _pump(self, relay: Relay, toward: Toward, scope: anyio.CancelScope) -> None:
        source = relay.dialer if toward is Toward.PRODUCER else relay.listener
        cutter = _Cutter()
        try:
            while True:
                await self._may_pass(toward)
                for data in cutter.feed(await source.receive(READ_BYTES)):
                    await self._take(Seen(relay, toward, data, _meaning(data)))
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            if not self.deaf:
                scope.cancel()

    async def _may_pass(self, toward: Toward) -> None:
        event = self._stopped.get(toward)
        if event is not None:
            await event.wait()

    async def _take(self, seen: Seen) -> None:
        self.frames.append(seen)
        rule = next((each for each in reversed(self._rules) if each._meets(seen)), None)
        if rule is not None:
            rule.seen.append(seen)
            await anyio.sleep(rule.delay_s)
            if rule.act is Act.DROP:
                return
            if rule.act is Act.HOLD:
                await rule.lifted()
        await self._may_pass(seen.toward)
        for _ in range(2 if rule is not None and rule.act is Act.TWICE else 1):
            await seen.relay.send(seen.data, seen.toward)
        await anyio.sleep(len(seen.data) / self.bytes_per_s[seen.toward])


def _meaning(data: bytes) -> Message | Malformed | None:
    """What a frame says; None for bytes that are none."""
    length = int.from_bytes(data[:LENGTH_BYTES], "big")
    if len(data) != LENGTH_BYTES + length:
        return None
    return Decoder().feed(data)[0]


class _Cutter:
    """Cuts a stream into frames, without a bound: what an endpoint would refuse, it is to see."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        found = []
        while len(self._buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if len(self._buffer) < end:
                break
            found.append(self._buffer[:end])
            self._buffer = self._buffer[end:]
        return found

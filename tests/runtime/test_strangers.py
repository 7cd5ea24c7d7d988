"""Strangers on the control channel: floods, silence, garbage, with and without TLS.

Each is refused, counted by cause, and costs nobody else anything.
"""

from __future__ import annotations

import os
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream
from attrs import define, evolve
from tests.runtime.keys import Authority
from tests.runtime.test_channel import HELLO, ends, until

from pushkv.core.effects import ProducerAddress
from pushkv.core.events import ConnectionClosed, ConnectionOpened, Event, MessageReceived
from pushkv.core.ids import EngineId
from pushkv.core.messages import Hello, Message, Ping, Refused
from pushkv.runtime.admission import Limits
from pushkv.runtime.channel import Channel
from pushkv.runtime.credentials import Tls
from pushkv.wire import Decoder, frame

pytestmark = pytest.mark.asyncio


@define
class End:
    """A channel that listens, with what it delivered and counted, and how a peer reaches it."""

    channel: Channel
    port: int
    events: list[Event]
    counts: Counter[str]
    tls: Tls | None

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.events if isinstance(each, kind)]

    async def raw(self) -> ByteStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def connect(self, context: ssl.SSLContext | None = None) -> ByteStream:
        stream = await self.raw()
        if self.tls is None:
            return stream
        return await TLSStream.wrap(
            stream,
            server_side=False,
            ssl_context=context or self.tls.client(),
            standard_compatible=False,
        )

    async def greet(self) -> tuple[ByteStream, int]:
        known = len(self.of(MessageReceived))
        stream = await self.connect()
        await stream.send(frame(HELLO))
        await until(lambda: len(self.of(MessageReceived)) > known)
        return stream, self.of(MessageReceived)[-1].connection

    async def still_serves(self) -> None:
        stream, number = await self.greet()
        self.channel.send(number, Ping(42))
        with anyio.fail_after(5):
            assert await stream.receive() == frame(Ping(42))
        await stream.aclose()


@asynccontextmanager
async def listening(tls: Tls | None, **limits: Any) -> AsyncIterator[End]:
    events: list[Event] = []
    counts: Counter[str] = Counter()

    def count(cause: str, _: str) -> None:
        counts[cause] += 1

    channel = Channel(events.append, count, Limits(**limits), tls)
    port = await channel.listen("127.0.0.1", 0)
    async with anyio.create_task_group() as tasks:
        channel.serve(tasks)
        try:
            yield End(channel, port, events, counts, tls)
        finally:
            await channel.close(0.1)
            tasks.cancel_scope.cancel()


@pytest.fixture(params=["plaintext", "tls"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> Tls | None:
    if request.param == "plaintext":
        return None
    return Tls(Authority(tmp_path).sign("peer", ("peer", "other")), EngineId("peer"))


@pytest.fixture
def secured(tmp_path: Path) -> Tls:
    return Tls(Authority(tmp_path).sign("peer", ("peer",)), EngineId("peer"))


async def heard(stream: ByteStream) -> list[Message]:
    """What the other side says until it closes."""
    data = b""
    with anyio.fail_after(10):
        try:
            while True:
                data += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            await stream.aclose()
    found = Decoder().feed(data)
    assert all(isinstance(each, Ping | Hello | Refused) for each in found)
    return found  # type: ignore[return-value]


# -- floods


async def test_a_thousand_connections_of_a_stranger_hold_up_nobody(tls: Tls | None) -> None:
    async with listening(tls, hello_s=60, handshake_s=60) as end:
        known, number = await end.greet()
        kept = []
        for _ in range(1_000):
            kept.append(await end.raw())
            if len(kept) % 250 == 0:
                await end.still_serves()
        await until(lambda: end.counts["stranger_dropped"] >= 1_000 - 64)
        strangers = end.channel._admission
        assert len(strangers) <= 64 + 2
        await until(lambda: len(end.channel._connections) <= 64 + 2)
        assert end.counts["too_many_connections"] == 0
        end.channel.send(number, Ping(7))
        with anyio.fail_after(5):
            assert await known.receive() == frame(Ping(7))
        for stream in kept:
            await anyio.aclose_forcefully(stream)
        await known.aclose()
        await until(lambda: not end.channel._connections)
        assert len(end.channel._admission) == 0
        assert not end.channel._admission._by_address


async def test_strangers_leave_nothing_behind(tls: Tls | None) -> None:
    async with listening(tls) as end:
        await end.still_serves()
        await until(lambda: not end.channel._connections)
        before = len(os.listdir("/proc/self/fd"))
        for said in (b"", b"\0", b"GET / HTTP/1.0\r\n\r\n", os.urandom(500)) * 10:
            stream = await end.raw()
            if said:
                await stream.send(said)
            await stream.aclose()
        await until(lambda: not end.channel._connections)
        assert len(os.listdir("/proc/self/fd")) <= before
        opened = {each.connection for each in end.of(ConnectionOpened)}
        assert opened == {each.connection for each in end.of(ConnectionClosed)}
        await end.still_serves()


async def test_a_flood_of_messages_slows_its_own_connection_alone(tls: Tls | None) -> None:
    async with listening(tls, messages_per_s=2_000, messages_at_once=100) as end:
        flooding, number = await end.greet()
        sent = 1_500
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flooding.send, b"".join(frame(Ping(at)) for at in range(sent)))
            await until(lambda: end.counts["too_many_messages"])
            got = [each for each in end.of(MessageReceived) if each.connection == number]
            for _ in range(3):
                await end.still_serves()

        def stamps() -> list[int]:
            mine = [each for each in end.of(MessageReceived) if each.connection == number]
            return [each.message.stamp for each in mine if isinstance(each.message, Ping)]

        await until(lambda: len(stamps()) == sent)
        assert stamps() == list(range(sent)), "none is lost, all in order"
        assert len(got) <= sent + 1
        await flooding.aclose()


async def test_what_waits_for_all_peers_is_bounded_and_the_slowest_is_hung_up_on(
    tls: Tls | None,
) -> None:
    async with listening(tls, queued_bytes_in_all_most=20_000_000) as end:
        slow, number = await end.greet()
        better, other = await end.greet()
        big = evolve(HELLO, memory=b"m" * 1_000_000)
        for _ in range(3):
            end.channel.send(other, big)
        for _ in range(40):
            end.channel.send(number, big)
            await anyio.sleep(0)
            if end.counts["channels_full"]:
                break
        await until(lambda: end.of(ConnectionClosed))
        (closed,) = end.of(ConnectionClosed)
        assert closed.connection == number
        assert "the most of all peers" in closed.cause
        assert end.counts["channel_full"] == 0
        await slow.aclose()
        await better.aclose()
        await until(lambda: not end.channel._connections)
        assert end.channel._queued_bytes == 0


# -- first words


@pytest.mark.parametrize(
    ("said", "cause", "field"),
    [
        (frame(Ping(1)), "message_before_hello", "message"),
        (b"\0\0\0\x03\x01\x0d\xc1", "malformed_hello", "hello"),
        (b"\0\0\0\x03\x63\x0d\xc1", "malformed_hello", "protocol"),
        (b"\0\0\0\x03\x01\xff\xc1", "malformed_hello", "message"),
    ],
)
async def test_whose_first_message_is_no_hello_is_told_and_hung_up_on(
    tls: Tls | None, said: bytes, cause: str, field: str
) -> None:
    async with listening(tls) as end:
        known, number = await end.greet()
        stream = await end.connect()
        await stream.send(said + frame(HELLO) + frame(Ping(5)))
        (refused,) = await heard(stream)
        assert isinstance(refused, Refused)
        assert refused.field == field
        await until(lambda: len(end.of(ConnectionClosed)) == 1)
        assert end.counts == {cause: 1}
        assert [each.connection for each in end.of(MessageReceived)] == [number]
        await end.still_serves()
        await known.aclose()


async def test_a_first_frame_is_short_and_later_ones_may_be_long(tls: Tls | None) -> None:
    async with listening(tls, hello_bytes_most=1_000) as end:
        stream = await end.connect()
        await stream.send(frame(evolve(HELLO, memory=b"m" * 1_000)))
        await ends(stream)  # type: ignore[arg-type]
        await until(lambda: end.counts["broken_frame"] == 1)
        assert "2 to 1000 bytes" in end.of(ConnectionClosed)[0].cause
        stream = await end.connect()
        await stream.send(frame(HELLO) + frame(evolve(HELLO, memory=b"m" * 100_000)))
        await until(lambda: len(end.of(MessageReceived)) == 2)
        await stream.aclose()


async def test_one_byte_at_a_time_is_not_waited_for(tls: Tls | None) -> None:
    async with listening(tls, hello_s=0.1, handshake_s=0.1) as end:
        stream = await end.raw()
        with anyio.fail_after(10):
            try:
                for byte in b"\x16\x03\x01\x02" if tls else frame(HELLO):
                    await stream.send(bytes([byte]))
                    await anyio.sleep(0.04)
                while True:
                    await stream.receive()
            except (anyio.BrokenResourceError, anyio.EndOfStream):
                pass
        assert end.counts["tls_failed" if tls else "no_hello"] == 1
        await stream.aclose()
        await end.still_serves()


async def test_a_name_that_the_certificate_does_not_have_is_refused(secured: Tls) -> None:
    async with listening(secured) as end:
        stream = await end.connect()
        await stream.send(frame(evolve(HELLO, engine=EngineId("other"))))
        (refused,) = await heard(stream)
        assert refused == Refused("engine", "peer", "other, with a certificate that names peer")
        assert end.counts == {"wrong_identity": 1}
        assert end.of(MessageReceived) == []
        await end.still_serves()


# -- garbage in place of TLS


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        frame(HELLO),
        b"\x16\x03\x01\xff\xff" + b"\0" * 1_000,
        b"\x15\x03\x03\x00\x02\x02\x28",
        os.urandom(2_000),
        b"\x80\x2e\x01\x00\x02" + b"\0" * 43,
    ],
    ids=["http", "plaintext", "huge-record", "alert", "random", "sslv2"],
)
async def test_garbage_in_place_of_tls_harms_nobody(secured: Tls, garbage: bytes) -> None:
    async with listening(secured, handshake_s=0.3) as end:
        known, number = await end.greet()
        stream = await end.raw()
        await stream.send(garbage)
        assert HELLO.engine.encode() not in await silent(stream)
        await until(lambda: end.counts["tls_failed"] == 1)
        assert len(end.of(ConnectionOpened)) == 1, "the core never hears of it"
        end.channel.send(number, Ping(3))
        assert await known.receive() == frame(Ping(3))
        await end.still_serves()
        await known.aclose()


async def silent(stream: ByteStream) -> bytes:
    """Whatever comes until the other side closes."""
    data = b""
    with anyio.fail_after(10):
        try:
            while True:
                data += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            await stream.aclose()
    return data


async def test_a_stranger_with_a_certificate_of_its_own_hears_nothing(
    secured: Tls, tmp_path: Path
) -> None:
    folder = tmp_path / "stranger"
    folder.mkdir()
    stranger = Tls(Authority(folder).sign("peer", ("peer",)), EngineId("peer"))
    context = stranger.client()
    context.verify_mode = ssl.CERT_NONE
    async with listening(secured) as end:
        try:
            stream = await end.connect(context)
            await stream.send(frame(HELLO))
            assert await silent(stream) == b""
        except (ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream):
            pass
        await until(lambda: end.counts["tls_failed"] == 1)
        assert end.of(ConnectionOpened) == []
        await end.still_serves()


@pytest.mark.parametrize("kind", ["silent", "plaintext", "another authority"])
async def test_a_dialler_tells_nothing_to_who_is_not_its_peer(
    secured: Tls, tmp_path: Path, kind: str
) -> None:
    """Whoever sends a request chooses the address; what listens there learns nothing."""
    heard_there = bytearray()
    folder = tmp_path / "stranger"
    folder.mkdir()
    theirs = Tls(Authority(folder).sign("peer", ("peer",)), EngineId("peer"))

    async def serve(stream: ByteStream) -> None:
        async with stream:
            try:
                if kind == "another authority":
                    stream = await TLSStream.wrap(
                        stream, server_side=True, ssl_context=theirs.server()
                    )
                elif kind == "plaintext":
                    await stream.send(frame(HELLO))
                while True:
                    heard_there.extend(await stream.receive())
            except (anyio.EndOfStream, anyio.BrokenResourceError, ssl.SSLError):
                pass

    async with listening(secured, dial_s=0.3) as end, anyio.create_task_group() as tasks:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        address = ProducerAddress("127.0.0.1", port)
        end.channel.dial(address)
        await until(lambda: end.of(ConnectionClosed))
        (closed,) = end.of(ConnectionClosed)
        assert len(end.events) == 1
        assert (closed.connection, closed.dialed) == (None, address)
        assert end.counts == {"dial_failed": 1}
        assert bytes(HELLO.engine, "ascii") not in heard_there
        assert end.channel._connections == {}
        tasks.cancel_scope.cancel()
    await listener.aclose()

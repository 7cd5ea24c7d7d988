"""The control channel under bad peers: each harms its own connection, and nobody waits for ever."""

from __future__ import annotations

import errno
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from attrs import define, evolve
from tests.runtime.descriptors import few_descriptors

from pushkv.core.effects import ProducerAddress
from pushkv.core.errors import ConfigurationError
from pushkv.core.events import ConnectionClosed, ConnectionOpened, Event, MessageReceived
from pushkv.core.ids import AttemptId, Duration, EngineId, Incarnation, TransferId
from pushkv.core.messages import Hello, Ping, RankAddress, Registered
from pushkv.runtime.addresses import is_loopback, neighbourhood
from pushkv.runtime.admission import Limits
from pushkv.runtime.channel import Channel
from pushkv.wire import FRAME_BYTES_MOST, frame

pytestmark = pytest.mark.asyncio

HELLO = Hello(
    protocol=1,
    nonce=7,
    engine=EngineId("peer"),
    incarnation=Incarnation(1),
    rank=0,
    model=(),
    layout=(),
    transport="memory",
    transport_version="1",
    lease=Duration(1),
    directory=(RankAddress(0, "127.0.0.1", 1),),
    memory=b"",
)


@define
class Listening:
    channel: Channel
    port: int
    events: list[Event]
    counts: Counter[str]

    def of(self, kind: type[Event]) -> list[Event]:
        return [each for each in self.events if isinstance(each, kind)]

    async def connect(self) -> SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def greet(self) -> tuple[SocketStream, int]:
        """A peer that has said HELLO; and its number."""
        known = len(self.of(MessageReceived))
        stream = await self.connect()
        await stream.send(frame(HELLO))
        await until(lambda: len(self.of(MessageReceived)) > known)
        message = self.of(MessageReceived)[-1]
        assert isinstance(message, MessageReceived)
        return stream, message.connection


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.002)


@asynccontextmanager
async def listening(**limits: Any) -> AsyncIterator[Listening]:
    events: list[Event] = []
    counts: Counter[str] = Counter()

    def count(cause: str, _: str) -> None:
        counts[cause] += 1

    channel = Channel(events.append, count, Limits(**limits))
    port = await channel.listen("127.0.0.1", 0)
    async with anyio.create_task_group() as tasks:
        channel.serve(tasks)
        try:
            yield Listening(channel, port, events, counts)
        finally:
            await channel.close(0.1)
            tasks.cancel_scope.cancel()


async def ends(stream: SocketStream) -> None:
    """The other side closes `stream`, whatever it still says before."""
    with anyio.fail_after(10):
        try:
            while True:
                await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            await stream.aclose()


async def still_serves(end: Listening) -> None:
    stream, number = await end.greet()
    end.channel.send(number, Ping(42))
    with anyio.fail_after(5):
        assert await stream.receive() == frame(Ping(42))
    await stream.aclose()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        (FRAME_BYTES_MOST + 1).to_bytes(4, "big"),
        b"\0\0\0\0",
        b"\xff" * 100,
    ],
)
async def test_what_cannot_be_framed_ends_its_connection_alone(garbage: bytes) -> None:
    async with listening() as end:
        other, number = await end.greet()
        stream = await end.connect()
        await stream.send(garbage)
        await ends(stream)
        await until(lambda: end.counts["broken_frame"] == 1)
        closed = end.of(ConnectionClosed)
        assert len(closed) == 1
        assert isinstance(closed[0], ConnectionClosed)
        assert "frame length" in closed[0].cause
        end.channel.send(number, Ping(1))
        assert await other.receive() == frame(Ping(1))
        await other.aclose()


async def test_a_bad_body_is_counted_and_its_connection_lives() -> None:
    async with listening() as end:
        stream, _ = await end.greet()
        bad = bytearray(frame(Ping(3)))
        bad[-1] = 0xC1  # no MessagePack value begins so
        await stream.send(bytes(bad) + frame(Ping(4)))
        await until(lambda: len(end.of(MessageReceived)) == 2)
        received = end.events[-1]
        assert isinstance(received, MessageReceived)
        assert received.message == Ping(4)
        assert end.counts == {"malformed_message": 1}
        assert end.of(ConnectionClosed) == []
        await stream.aclose()


@pytest.mark.parametrize("said", [b"", b"\0\0", frame(HELLO)[:-1]])
async def test_who_says_no_hello_is_hung_up_on(said: bytes) -> None:
    async with listening(hello_s=0.05) as end:
        greeted, _ = await end.greet()
        silent = await end.connect()
        if said:
            await silent.send(said)
        await ends(silent)
        await until(lambda: end.counts["no_hello"] == 1)
        assert len(end.of(ConnectionClosed)) == 1, "the greeted one stays"
        await still_serves(end)
        await greeted.aclose()


async def test_a_peer_that_does_not_read_is_closed_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pushkv.runtime.channel.UNREAD_S", 0.05)
    async with listening(queued_bytes_most=1_000_000) as end:
        slow, number = await end.greet()
        big = evolve(HELLO, memory=b"m" * 100_000)
        for _ in range(200):  # far more than the sockets' buffers hold
            end.channel.send(number, big)
            await anyio.sleep(0.005)
            if end.counts["channel_full"]:
                break
        assert end.counts["channel_full"] == 1
        await until(lambda: end.of(ConnectionClosed))
        closed = end.of(ConnectionClosed)[0]
        assert isinstance(closed, ConnectionClosed)
        assert "does not read" in closed.cause
        end.channel.send(number, Ping(1))
        assert end.counts["no_connection"] == 1
        await still_serves(end)
        await slow.aclose()


async def test_much_to_say_at_once_costs_no_peer_its_connection_that_reads() -> None:
    async with listening(queued_bytes_most=1_000) as end:
        stream, number = await end.greet()
        said = [frame(Ping(stamp)) for stamp in range(1_000)]
        for stamp in range(1_000):  # as after a pause, when everything is due
            end.channel.send(number, Ping(stamp))
        heard = b""
        with anyio.fail_after(5):
            while len(heard) < sum(map(len, said)):
                heard += await stream.receive()
        assert heard == b"".join(said)
        assert end.counts == {}
        await stream.aclose()


async def test_a_connection_that_is_being_closed_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pushkv.runtime.channel.UNREAD_S", 0.0)
    async with listening(queued_bytes_most=1) as end:
        stream, number = await end.greet()
        for stamp in range(3):
            end.channel.send(number, Ping(stamp))
        assert end.counts == {"channel_full": 1, "no_connection": 2}
        await ends(stream)


async def test_the_last_descriptors_are_not_spent_on_new_peers() -> None:
    async with listening() as end:
        greeted, number = await end.greet()
        with few_descriptors():
            stranger = await end.connect()
            await ends(stranger)
            end.channel.dial(ProducerAddress("127.0.0.1", end.port))
            await until(lambda: end.of(ConnectionClosed))
            end.channel.send(number, Ping(7))
            assert await greeted.receive() == frame(Ping(7))
        (closed,) = end.of(ConnectionClosed)
        assert isinstance(closed, ConnectionClosed)
        assert "too few file descriptors" in closed.cause
        assert end.counts == {"no_descriptors": 2}
        await still_serves(end)
        await greeted.aclose()


async def test_an_unsendable_message_is_counted_and_the_next_one_leaves() -> None:
    async with listening() as end:
        stream, number = await end.greet()
        attempt = AttemptId(EngineId("e"), Incarnation(1), 0, 0, TransferId("t" * 600), 0)
        end.channel.send(number, Registered(attempt))
        end.channel.send(number, Ping(5))
        assert await stream.receive() == frame(Ping(5))
        assert end.counts == {"unsendable_message": 1}
        await stream.aclose()


@pytest.mark.parametrize("which", ["connections_most", "connections_per_address_most"])
async def test_more_connections_than_allowed_are_closed_at_once(which: str) -> None:
    async with listening(**{which: 2}) as end:
        kept = [await end.greet() for _ in range(2)]
        third = await end.connect()
        await ends(third)
        assert end.counts["too_many_connections"] == 1
        await kept.pop()[0].aclose()
        await until(lambda: end.of(ConnectionClosed))
        await still_serves(end)
        await kept.pop()[0].aclose()


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("127.0.0.1", 1),
        ("no-such-host.invalid", 80),
        ("x" * 300, 80),
        ("a..b", 80),
        ("nul\0byte", 80),
        ("127.0.0.1", 70_000),
        ("127.0.0.1", -1),
    ],
)
async def test_a_dial_that_cannot_succeed_is_reported_whatever_the_address(
    host: str, port: int
) -> None:
    async with listening() as end:
        address = ProducerAddress(host, port)
        end.channel.dial(address)
        await until(lambda: end.events)
        (closed,) = end.events
        assert isinstance(closed, ConnectionClosed)
        assert (closed.connection, closed.dialed) == (None, address)
        assert closed.cause
        await still_serves(end)


async def test_a_dial_into_a_black_hole_is_bounded() -> None:
    with socket.socket() as hole:  # its queue of connections is full: SYNs are not answered
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(hole.getsockname())
            fillers.append(filler)
        async with listening(dial_s=0.2) as end:
            address = ProducerAddress(*hole.getsockname())
            end.channel.dial(address)
            await until(lambda: end.events)
            assert end.events == [ConnectionClosed(None, address, "no answer within 0.2 s")]
        for filler in fillers:
            filler.close()


async def test_hanging_up_sends_what_is_queued_first() -> None:
    async with listening() as end:
        stream, number = await end.greet()
        for stamp in range(1000):
            end.channel.send(number, Ping(stamp))
        end.channel.hang_up(number)
        with anyio.fail_after(5):
            received = b"".join([data async for data in stream])
        assert received == b"".join(frame(Ping(stamp)) for stamp in range(1000))
        end.channel.send(number, Ping(1))
        assert end.counts["no_connection"] == 1
        await stream.aclose()


async def test_hanging_up_on_who_does_not_read_is_bounded() -> None:
    async with listening() as end:
        stream, number = await end.greet()
        for _ in range(100):
            end.channel.send(number, evolve(HELLO, memory=b"m" * 100_000))
        end.channel.hang_up(number, flush_s=0.05)
        await until(lambda: end.of(ConnectionClosed))
        await stream.aclose()


async def test_closing_the_channel_sends_what_is_queued_first() -> None:
    async with listening() as end:
        stream, number = await end.greet()
        end.channel.send(number, Ping(9))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end.channel.close)
            assert await stream.receive() == frame(Ping(9))
            await ends(stream)
        assert len(end.of(ConnectionClosed)) == 1
        with pytest.raises(OSError, match="failed"):
            await end.connect()


async def test_a_peer_that_goes_in_the_middle_of_a_frame_is_an_ordinary_end() -> None:
    async with listening() as end:
        stream, _ = await end.greet()
        await stream.send(frame(Ping(1))[:7])
        await stream.aclose()
        await until(lambda: end.of(ConnectionClosed))
        assert end.counts == {}
        await still_serves(end)


async def test_accepting_goes_on_after_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pushkv.runtime.channel.ACCEPT_AGAIN_S", 0.01)
    async with listening() as end:
        kind: Any = type(end.channel._listener)
        accept = kind.accept
        failures = 3

        async def full(self: object) -> SocketStream:
            nonlocal failures
            if failures:
                failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            stream: SocketStream = await accept(self)
            return stream

        monkeypatch.setattr(kind, "accept", full)
        await (await end.connect()).aclose()  # ends the accept under way
        await still_serves(end)
        assert end.counts["accept_failed"] == 3


async def test_what_nobody_expected_ends_its_connection_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening() as end:
        broken, number = await end.greet()
        take = Channel._take

        def raising(self: Channel, connection: Any, item: Any) -> None:
            if connection.number == number:
                raise RuntimeError("nobody expected this")
            take(self, connection, item)

        monkeypatch.setattr(Channel, "_take", raising)
        await broken.send(frame(Ping(1)))
        await ends(broken)
        assert end.counts == {"connection_broke": 1}
        closed = end.events[-1]
        assert isinstance(closed, ConnectionClosed)
        assert "nobody expected this" in closed.cause
        await still_serves(end)


async def test_many_connections_leave_nothing_behind() -> None:
    async with listening() as end:
        await still_serves(end)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(40):
            stream, _ = await end.greet()
            await stream.aclose()
        for _ in range(40):
            await (await end.connect()).aclose()
        await until(lambda: len(end.of(ConnectionClosed)) == 81)
        assert len(end.of(ConnectionOpened)) == 81
        assert end.channel._connections == {}
        assert len(os.listdir("/proc/self/fd")) <= before
        names = [each.name for each in anyio.get_running_tasks()]
        assert not [name for name in names if "Channel._run" in str(name)], names


async def test_an_address_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"listen = '127\.0\.0\.1:{port}'.*in use"):
            await Channel(print, print).listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "300.1.1.1"])
async def test_an_address_that_is_none_is_named(host: str) -> None:
    with pytest.raises(ConfigurationError, match="listen = "):
        await Channel(print, print).listen(host, 0)


async def test_only_loopback_is_loopback() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "example.org")))
    assert is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("::ffff:10.0.0.1")


async def test_a_host_of_ipv6_counts_as_its_prefix() -> None:
    assert neighbourhood("10.1.2.3") == "10.1.2.3"
    assert neighbourhood("fe80::1:2%eth0") == neighbourhood("fe80::ffff:9") == "fe80::/64"
    assert neighbourhood("2001:db8::1") != neighbourhood("2001:db8:0:1::1")
    assert neighbourhood("::ffff:10.1.2.3") != neighbourhood("::ffff:10.1.2.4")
    assert neighbourhood("") == ""

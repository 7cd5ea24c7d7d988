"""The proxy between control channels: frames pass as they are, but for what a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from anyio.abc import SocketStream
from attrs import define

from pushkv.core.effects import ProducerAddress
from pushkv.core.ids import AttemptId, EngineId, Incarnation, TransferId
from pushkv.core.messages import Ping, Query, Registered, Revoke
from pushkv.testing.channel_faults import Act, ChannelFaults, Seen, Toward
from pushkv.wire import Malformed, frame

pytestmark = pytest.mark.asyncio

ATTEMPT = AttemptId(EngineId("D"), Incarnation(1), 0, 0, TransferId("t"), 3)
PINGS = [frame(Ping(stamp)) for stamp in range(5)]
QUERY, REVOKE, REGISTERED = (
    frame(Query(ATTEMPT)),
    frame(Revoke(ATTEMPT)),
    frame(Registered(ATTEMPT)),
)


@define
class Ends:
    """A proxy, and a connection through it."""

    faults: ChannelFaults
    dialer: SocketStream
    listener: SocketStream


@asynccontextmanager
async def joined(buffer_bytes: int = 0) -> AsyncIterator[Ends]:
    accepted, streams = anyio.create_memory_object_stream[SocketStream](4)

    async def accept(stream: SocketStream) -> None:
        await accepted.send(stream)
        await anyio.sleep_forever()

    listeners = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listeners.extra(anyio.abc.SocketAttribute.local_port)
    async with listeners, accepted, streams, anyio.create_task_group() as tasks:
        tasks.start_soon(listeners.serve, accept)
        async with ChannelFaults(ProducerAddress("127.0.0.1", port), buffer_bytes) as faults:
            dialer = await anyio.connect_tcp(faults.address.host, faults.address.port)
            async with dialer, await streams.receive() as listener:
                yield Ends(faults, dialer, listener)
        tasks.cancel_scope.cancel()


async def hears(stream: SocketStream, *frames: bytes) -> None:
    """Exactly these frames come, and nothing after them for a while."""
    expected = b"".join(frames)
    found = b""
    with anyio.fail_after(5):
        while len(found) < len(expected):
            found += await stream.receive()
    assert found == expected
    await hears_nothing(stream)


async def hears_nothing(stream: SocketStream) -> None:
    with anyio.move_on_after(0.05):
        raise AssertionError(f"{await stream.receive()!r} came")


async def hears_the_end(stream: SocketStream) -> None:
    with anyio.fail_after(5), suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        while True:
            await stream.receive()


async def test_frames_pass_as_they_are_and_are_understood() -> None:
    async with joined() as ends:
        for data in (PINGS[0][:5], PINGS[0][5:] + PINGS[1] + QUERY[:3], QUERY[3:]):
            await ends.dialer.send(data)
        await hears(ends.listener, PINGS[0], PINGS[1], QUERY)
        await ends.listener.send(REGISTERED)
        await hears(ends.dialer, REGISTERED)
        seen = ends.faults.frames
        assert [each.message for each in seen[:2]] == [Ping(0), Ping(1)]
        assert (seen[2].attempt, seen[2].toward) == (ATTEMPT, Toward.PRODUCER)
        assert (seen[0].attempt, seen[3].toward) == (None, Toward.CONSUMER)
        assert (await ends.faults.passed(Ping, count=2)).data == PINGS[1]
        assert seen[0].relay is ends.faults.relay


async def test_what_is_no_message_passes_too() -> None:
    odd = (4).to_bytes(4, "big") + bytes((1, 99)) + b"??"
    async with joined() as ends:
        await ends.dialer.send(odd)
        await hears(ends.listener, odd)
        assert isinstance(ends.faults.frames[0].message, Malformed)
        await ends.dialer.aclose()
        await hears_the_end(ends.listener)


async def test_what_is_held_holds_up_what_follows_it_that_way_alone() -> None:
    async with joined() as ends:
        rule = ends.faults.rule(Query, act=Act.HOLD)
        for data in (PINGS[0], QUERY, PINGS[1]):
            await ends.dialer.send(data)
        await hears(ends.listener, PINGS[0])
        await ends.listener.send(REGISTERED)
        await hears(ends.dialer, REGISTERED)
        rule.lift()
        await hears(ends.listener, QUERY, PINGS[1])
        await ends.dialer.send(QUERY)
        await hears(ends.listener, QUERY)
        assert len(rule.seen) == 1


async def test_rules_meet_what_they_name_as_often_as_they_may_and_the_newest_decides() -> None:
    def later(seen: Seen) -> bool:
        return isinstance(seen.message, Ping) and seen.message.stamp > 1

    async with joined() as ends:
        dropped = ends.faults.rule(Ping, toward=Toward.PRODUCER, act=Act.DROP, where=later, times=2)
        await ends.listener.send(PINGS[2])
        await hears(ends.dialer, PINGS[2])
        await ends.dialer.send(b"".join(PINGS))
        await hears(ends.listener, PINGS[0], PINGS[1], PINGS[4])
        assert dropped.is_over
        ends.faults.rule(act=Act.DROP)
        twice = ends.faults.rule(Revoke, act=Act.TWICE)
        await ends.dialer.send(PINGS[0] + REVOKE + QUERY)
        await hears(ends.listener, REVOKE, REVOKE)
        twice.lift()
        await ends.dialer.send(REVOKE)
        await hears_nothing(ends.listener)


async def test_a_delay_and_a_slow_link_take_their_time() -> None:
    async with joined() as ends:
        ends.faults.rule(Query, delay_s=0.1)
        began = anyio.current_time()
        await ends.dialer.send(QUERY)
        await hears(ends.listener, QUERY)
        assert anyio.current_time() - began >= 0.1
        ends.faults.bytes_per_s[Toward.CONSUMER] = 10 * len(REGISTERED)
        began = anyio.current_time()
        await ends.listener.send(REGISTERED * 3)
        await hears(ends.dialer, *[REGISTERED] * 3)
        assert anyio.current_time() - began >= 0.2


async def test_what_a_test_adds_comes_through_either_way_past_any_rule() -> None:
    async with joined() as ends:
        ends.faults.rule(act=Act.DROP)
        await ends.faults.inject(Revoke(ATTEMPT), Toward.PRODUCER)
        await hears(ends.listener, REVOKE)
        await ends.faults.inject(b"\xff\xff\xff\xff", Toward.CONSUMER)
        await hears(ends.dialer, b"\xff\xff\xff\xff")


@pytest.mark.parametrize("toward", Toward)
async def test_a_cut_end_hears_of_it_and_the_other_as_the_test_wants(toward: Toward) -> None:
    for deaf in (False, True):
        async with joined() as ends:
            ends.faults.deaf = deaf
            await ends.faults.cut(toward)
            there, other = ends.listener, ends.dialer
            if toward is Toward.CONSUMER:
                there, other = other, there
            await hears_the_end(there)
            if deaf:
                await hears_nothing(other)
                await ends.faults.cut()
            await hears_the_end(other)


async def test_a_direction_that_is_stopped_fills_up_and_goes_on() -> None:
    chunk = PINGS[0] * 1_000
    async with joined(buffer_bytes=4_096) as ends:
        ends.faults.stop(Toward.PRODUCER)
        sent = 0
        with anyio.move_on_after(0.3):
            while sent < 10_000:
                await ends.dialer.send(chunk)
                sent += 1
        assert sent < 10_000, "nobody reads, and yet it never filled up"
        await ends.listener.send(REGISTERED)
        await hears(ends.dialer, REGISTERED)
        ends.faults.go_on(Toward.PRODUCER)
        with anyio.fail_after(5):
            assert await ends.listener.receive()


async def test_new_connections_are_refused_or_lead_nowhere() -> None:
    async with joined() as ends:
        address = ends.faults.address
        ends.faults.refuses = True
        async with await anyio.connect_tcp(address.host, address.port) as refused:
            await hears_the_end(refused)
        ends.faults.refuses, ends.faults.mute = False, True
        async with await anyio.connect_tcp(address.host, address.port) as mute:
            await mute.send(PINGS[0])
            await hears_nothing(mute)
        assert len(ends.faults.relays) == 1


async def test_nobody_listening_behind_it_is_a_closed_connection() -> None:
    async with ChannelFaults(ProducerAddress("127.0.0.1", 1)) as faults:
        with pytest.raises(LookupError, match="nobody has dialled"):
            _ = faults.relay
        async with await anyio.connect_tcp(faults.address.host, faults.address.port) as dialer:
            await hears_the_end(dialer)

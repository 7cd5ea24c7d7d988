"""Every message survives the wire whole, however the stream is cut."""

from __future__ import annotations

from typing import Any, get_args

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv import wire
from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import AttemptId, Duration, EngineId, Incarnation, Part, TransferId
from pushkv.core.messages import (
    AttemptMessage,
    Complete,
    Failed,
    Grant,
    Hello,
    LinkMessage,
    Message,
    Ping,
    Progress,
    Query,
    RankAddress,
    Reason,
    Received,
    Refused,
    Register,
    Registered,
    Revoke,
    Revoked,
    Unproven,
)
from pushkv.testing import strategies

U64 = 2**64 - 1
I63 = 2**63 - 1
WIDE = "\U0001f600"  # four bytes of UTF-8: the longest a character can be


def attempt() -> AttemptId:
    return AttemptId(EngineId("decode-0"), Incarnation(7), 1, 2, TransferId("cmpl-1"), 3)


def widest_attempt() -> AttemptId:
    name = WIDE * wire.NAME_LENGTH_MOST
    last = wire.RANKS_MOST - 1
    return AttemptId(EngineId(name), Incarnation(U64), last, last, TransferId(name), I63)


def at_bounds() -> list[Message]:
    """One message of each class with every field at its upper bound."""
    name = widest_attempt()
    most = wire.TOKENS_MOST
    parts = tuple(Part(2**32 - 1, most, most) for _ in range(wire.PARTS_MOST))
    ranks = tuple(range(wire.RANKS_MOST))
    digest = b"\xff" * wire.DIGEST_BYTES_MOST
    share, rest = divmod(wire.BLOCKS_MOST, wire.GROUPS_MOST)
    blocks = tuple(
        (wire.BLOCK_ID_MOST,) * (share + (rest if group == 0 else 0))
        for group in range(wire.GROUPS_MOST)
    )
    value = WIDE * wire.PAIR_VALUE_LENGTH_MOST
    pairs = tuple(
        (f"{index:04}" + WIDE * (wire.PAIR_KEY_LENGTH_MOST - 4), value)
        for index in range(wire.PAIRS_MOST)
    )
    directory = tuple(RankAddress(rank, WIDE * 255, 65_535) for rank in ranks)
    memory = b"\xff" * wire.MEMORY_BYTES_MOST
    word = WIDE * 256
    return [
        Register(name, blocks, most, most, digest, digest, ranks, ranks, U64, Duration(I63)),
        Registered(name),
        Progress(name, most),
        Complete(name, parts),
        Failed(name, parts, max(Reason, key=len)),
        Revoked(name, parts),
        Unproven(name, parts),
        Revoke(name, True),
        Query(name),
        Received(name),
        Ping(U64),
        Grant(U64, Duration(I63), Incarnation(U64), Incarnation(U64)),
        Hello(
            65_535,
            U64,
            EngineId(WIDE * wire.NAME_LENGTH_MOST),
            Incarnation(U64),
            wire.RANKS_MOST - 1,
            pairs,
            pairs,
            word,
            word,
            Duration(I63),
            directory,
            memory,
            WIDE * wire.PROCESS_LENGTH_MOST,
        ),
        Refused(word, value, value),
    ]


def register(**changes: Any) -> Register:
    plain = Register(
        attempt(), ((1, 2),), 0, 32, b"prompt", b"layout", (0,), (0,), 9, Duration(10**9)
    )
    return attrs.evolve(plain, **changes)


def hello(**changes: Any) -> Hello:
    plain = Hello(
        wire.PROTOCOL,
        1,
        EngineId("prefill-0"),
        Incarnation(2),
        0,
        (("dtype", "float16"),),
        (("groups", "1"),),
        "memory",
        "1",
        Duration(10**10),
        (RankAddress(0, "127.0.0.1", 5600),),
        b"",
    )
    return attrs.evolve(plain, **changes)


@given(strategies.messages())
def test_a_message_comes_back_equal(message: Message) -> None:
    assert wire.Decoder().feed(wire.frame(message)) == [message]


@given(st.lists(strategies.messages(), max_size=6), st.data())
def test_cuts_in_the_stream_do_not_matter(sent: list[Message], data: st.DataObject) -> None:
    stream = b"".join(map(wire.frame, sent))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    decoder = wire.Decoder()
    received: list[Message | wire.Malformed] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += decoder.feed(stream[start:end])
    assert received == sent


def test_a_stream_may_come_byte_by_byte() -> None:
    sent: list[Message] = [register(), hello(), Revoke(attempt())]
    decoder = wire.Decoder()
    received = [
        item for byte in b"".join(map(wire.frame, sent)) for item in decoder.feed(bytes([byte]))
    ]
    assert received == sent


def test_every_message_class_has_a_place_on_the_wire() -> None:
    classes = set(get_args(AttemptMessage)) | set(get_args(LinkMessage))
    assert {type(message) for message in at_bounds()} == classes


@pytest.mark.parametrize("message", at_bounds(), ids=lambda message: type(message).__name__)
def test_every_field_may_be_at_its_bound(message: Message) -> None:
    framed = wire.frame(message)
    assert len(framed) - 4 <= wire.FRAME_BYTES_MOST
    assert wire.Decoder().feed(framed) == [message]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (register(end=wire.TOKENS_MOST + 1), "register.end"),
        (register(start=-1), "register.start"),
        (register(start=33), "register.end"),
        (register(prompt_digest=bytes(wire.DIGEST_BYTES_MOST + 1)), "register.prompt_digest"),
        (register(layout_digest=bytes(wire.DIGEST_BYTES_MOST + 1)), "register.layout_digest"),
        (register(producer_ranks=()), "register.producer_ranks"),
        (register(consumer_ranks=(0, wire.RANKS_MOST)), "register.consumer_ranks[1]"),
        (register(blocks=((1, wire.BLOCK_ID_MOST + 1),)), "register.blocks[0][1]"),
        (register(blocks=((),) * (wire.GROUPS_MOST + 1)), "register.blocks"),
        (register(blocks=((1,) * 500_001,) * 2), "register.blocks"),
        (register(blocks=((1,) * (wire.BLOCKS_MOST + 1),)), "register.blocks[0]"),
        (register(arrival_token=-1), "register.arrival_token"),
        (register(deadline=-1), "register.deadline"),
        (register(deadline=2**63), "register.deadline"),
        (Complete(attempt(), (Part(0, 0, 16), Part(1, 17, 16))), "complete.parts[1].end"),
        (Failed(attempt(), (Part(2**32, 0, 1),), Reason.WRITE), "failed.parts[0].number"),
        (Revoked(attempt(), (Part(0, 0, 0),) * (wire.PARTS_MOST + 1)), "revoked.parts"),
        (Progress(attempt(), -1), "progress.tokens"),
        (Grant(0, Duration(2**63), Incarnation(0), Incarnation(0)), "grant.lease"),
        (Grant(0, Duration(0), Incarnation(-1), Incarnation(0)), "grant.consumer_incarnation"),
        (Ping(-1), "ping.stamp"),
        (hello(engine=""), "hello.engine"),
        (hello(rank=wire.RANKS_MOST), "hello.rank"),
        (hello(protocol=65_536), "hello.protocol"),
        (hello(model=(("dtype", "a"), ("dtype", "b"))), "hello.model"),
        (hello(layout=(("", "a"),)), "hello.layout[0].key"),
        (hello(layout=(("a", "x" * 1_025),)), "hello.layout[0].value"),
        (
            hello(model=tuple((str(index), "") for index in range(wire.PAIRS_MOST + 1))),
            "hello.model",
        ),
        (hello(directory=(RankAddress(0, "h", 0),)), "hello.directory[0].port"),
        (hello(directory=(RankAddress(0, "", 1),)), "hello.directory[0].host"),
        (hello(memory=bytes(wire.MEMORY_BYTES_MOST + 1)), "hello.memory"),
        (Revoke(attrs.evolve(attempt(), transfer=TransferId(""))), "revoke.attempt.transfer"),
        (Revoke(attrs.evolve(attempt(), consumer=EngineId("x" * 513))), "revoke.attempt.consumer"),
        (Query(attrs.evolve(attempt(), attempt=2**63)), "query.attempt.attempt"),
        (Query(attrs.evolve(attempt(), producer_rank=-1)), "query.attempt.producer_rank"),
        # Values that MessagePack itself cannot hold name the message alone.
        (Ping(2**64), "ping"),
        (Revoke(attrs.evolve(attempt(), transfer=TransferId("\ud800"))), "revoke"),
    ],
)
def test_what_a_peer_would_refuse_is_refused_before_it_is_sent(
    message: Message, field: str
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        wire.frame(message)
    assert refusal.value.field == field
    assert len(str(refusal.value)) < 1_000

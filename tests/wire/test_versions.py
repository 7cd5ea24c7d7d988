"""Frames that were sent once are understood for as long as their protocol is spoken."""

from __future__ import annotations

import msgspec
import pytest

from pushkv import wire
from pushkv.core.ids import AttemptId, Duration, EngineId, Incarnation, Part, TransferId
from pushkv.core.messages import (
    Complete,
    Failed,
    Grant,
    Hello,
    Message,
    Ping,
    Query,
    RankAddress,
    Reason,
    Received,
    Refused,
    Register,
    Revoke,
)

A = AttemptId(EngineId("D"), Incarnation(2), 0, 0, TransferId("t"), 3)
LEASE = Duration(10**9)
HELLO = Hello(
    protocol=1,
    nonce=5,
    engine=EngineId("D"),
    incarnation=Incarnation(2),
    rank=0,
    model=(("m", "x"),),
    layout=(("b", "16"),),
    transport="memory",
    transport_version="1",
    lease=LEASE,
    directory=(RankAddress(0, "127.0.0.1", 4000),),
    memory=b"mem",
)
RECORDED: dict[str, Message] = {
    "00000004010b9109": Ping(9),
    "0000000b010c9409ce3b9aca000201": Grant(9, LEASE, Incarnation(2), Incarnation(1)),
    "0000000b010996a144020000a17403": Query(A),
    "0000000c010897a144020000a17403c3": Revoke(A, final=True),
    "0000000b010a96a144020000a17403": Received(A),
    "00000013010e93a56c65617365a431206e73a432206e73": Refused("lease", "1 ns", "2 ns"),
    "0000002101019fa144020000a17403919201020014c40170c4016c9100910007ce3b9aca00": Register(
        A, ((1, 2),), 0, 20, b"p", b"l", (0,), (0,), 7, LEASE
    ),
    "00000010010497a144020000a174039193000014": Complete(A, (Part(0, 0, 20),)),
    "00000011010598a144020000a1740390a4676f6e65": Failed(A, (), Reason.GONE),
    "0000003a010d9d0105a14402009192a16da1789192a162a23136a66d656d6f7279a131ce3b9aca0091"
    "9300a93132372e302e302e31cd0fa0c4036d656da0": HELLO,
}
"""Protocol 1, as the first build that spoke it sent it. Never changed, only taken away."""


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of the next protocol, in which QUERY has another tag."""
    codecs = dict(wire._CODECS)
    query = codecs[Query]
    codecs[Query] = wire._Codec(99, query.record, query.values, query.build)
    monkeypatch.setitem(wire._SPOKEN, 2, wire._words(codecs))
    monkeypatch.setattr(wire, "PROTOCOL", 2)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda text: type(RECORDED[text]).__name__)
def test_what_was_recorded_is_what_is_read_and_written(recorded: str) -> None:
    data, message = bytes.fromhex(recorded), RECORDED[recorded]
    assert wire.Decoder().feed(data) == [message]
    assert wire.frame(message) == data


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("recorded", RECORDED, ids=lambda text: type(RECORDED[text]).__name__)
def test_the_next_build_understands_it_and_answers_in_kind(recorded: str) -> None:
    data, message = bytes.fromhex(recorded), RECORDED[recorded]
    assert wire.Decoder().feed(data) == [message]
    assert wire.frame(message, 1) == data


@pytest.mark.usefixtures("newer")
def test_its_own_words_are_other_ones_and_its_greeting_is_not() -> None:
    own = wire.frame(Query(A), 2)
    assert own[4:6] == bytes((2, 99))
    assert wire.Decoder().feed(own) == [Query(A)]
    for greeting in (HELLO, Refused("lease", "1 ns", "2 ns")):
        assert wire.frame(greeting, 2) == wire.frame(greeting, 1)


def test_what_comes_from_the_future_is_refused_with_both_versions() -> None:
    (told,) = wire.Decoder().feed(b"\0\0\0\x03\x05\x0d\x90")
    assert told == wire.Malformed("protocol", 5, "1")
    fields = [*msgspec.msgpack.decode(wire.frame(HELLO)[6:]), "a field of the future"]
    for theirs, expected in ((5, "hello.protocol"), (2, "hello")):
        body = msgspec.msgpack.encode([theirs, *fields[1:]])
        frame = (len(body) + 2).to_bytes(4, "big") + bytes((1, 13)) + body
        (refused,) = wire.Decoder().feed(frame)
        assert isinstance(refused, wire.Malformed)
        assert refused.field == expected
        if theirs == 5:
            assert (refused.value, refused.expected) == (5, "1 or 2")

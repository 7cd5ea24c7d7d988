"""Whatever a peer sends: one `Malformed` per bad body, one error for a bad length, nothing else."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pushkv import wire
from pushkv.core.errors import RemoteProtocolError
from pushkv.core.ids import AttemptId, EngineId, Incarnation, TransferId
from pushkv.core.messages import Message, Query
from pushkv.testing import strategies

GOOD = Query(AttemptId(EngineId("decode-0"), Incarnation(7), 1, 2, TransferId("cmpl-1"), 3))
VALUES = ["decode-0", 7, 1, 2, "cmpl-1", 3]
QUERY_TAG = 9
HELLO_TAG = 13
REGISTER_TAG = 1


def framed(body: bytes, tag: int = QUERY_TAG, protocol: int = wire.PROTOCOL) -> bytes:
    return (len(body) + 2).to_bytes(4, "big") + bytes((protocol, tag)) + body


def packed(values: object, tag: int = QUERY_TAG) -> bytes:
    return framed(msgspec.msgpack.encode(values), tag)


def only(data: bytes) -> wire.Malformed:
    """The one refusal that `data` is; the connection must survive it."""
    decoder = wire.Decoder()
    found = decoder.feed(data)
    assert len(found) == 1
    assert isinstance(found[0], wire.Malformed)
    assert decoder.feed(wire.frame(GOOD)) == [GOOD]
    return found[0]


def test_the_values_used_here_are_a_message_when_nothing_is_wrong() -> None:
    assert wire.Decoder().feed(packed(VALUES)) == [GOOD]


@pytest.mark.parametrize(
    ("position", "value", "field", "expected"),
    [
        (0, "", "query.attempt.consumer", "`str` of length >= 1"),
        (0, b"decode-0", "query.attempt.consumer", "`str`"),
        (1, -1, "query.attempt.consumer_incarnation", "`int` >= 0"),
        (1, 7.0, "query.attempt.consumer_incarnation", "`int`"),
        (2, 1_024, "query.attempt.consumer_rank", "`int` <= 1023"),
        (2, True, "query.attempt.consumer_rank", "`int`"),
        (3, None, "query.attempt.producer_rank", "`int`"),
        (4, 5, "query.attempt.transfer", "`str`"),
        (4, "x" * 513, "query.attempt.transfer", "`str` of length <= 512"),
        (5, 2**63, "query.attempt.attempt", "`int` <= 9223372036854775807"),
        (5, "3", "query.attempt.attempt", "`int`"),
    ],
)
def test_a_bad_field_is_named_with_its_value(
    position: int, value: object, field: str, expected: str
) -> None:
    values = [*VALUES[:position], value, *VALUES[position + 1 :]]
    shown = value[:80] if isinstance(value, str) else value
    assert only(packed(values)) == wire.Malformed(field, shown, expected)


def test_a_missing_or_an_extra_field_is_refused() -> None:
    for values in (VALUES[:-1], [*VALUES, 0]):
        refusal = only(packed(values))
        assert (refusal.field, refusal.expected) == ("query", "`array` of length 6")
        assert refusal.value == f"{len(values)} elements"


def test_field_names_in_place_of_order_are_refused() -> None:
    assert only(packed({"attempt": VALUES})).field == "query"


def test_another_protocol_is_refused_by_name() -> None:
    body = msgspec.msgpack.encode(VALUES)
    for protocol in (0, 2, 255):
        assert only(framed(body, protocol=protocol)) == wire.Malformed("protocol", protocol, "1")


def test_an_unknown_tag_is_refused_by_name() -> None:
    for tag in (0, 15, 255):
        assert only(framed(b"\x90", tag)) == wire.Malformed("message", tag, "a tag of 1 to 14")


def test_an_unknown_reason_is_refused() -> None:
    refusal = only(packed([*VALUES, [], "bored"], tag=5))
    assert (refusal.field, refusal.value) == ("failed.reason", "bored")


def test_a_part_of_another_shape_is_refused() -> None:
    assert only(packed([*VALUES, [[0, 0, 16], [1, 16]]], tag=4)).field == "complete.parts[1]"
    assert only(packed([*VALUES, [[0, 16, 0]]], tag=4)).field == "complete.parts[0].end"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x96",
        msgspec.msgpack.encode(VALUES) + b"\x00",
        b"\x96\xa2\xff\xfe" + msgspec.msgpack.encode(VALUES)[10:],
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x81\x80\x00",
    ],
    ids=["empty", "opcode", "short", "long", "not-utf8", "deep", "count", "unhashable-key"],
)
def test_nonsense_harms_only_itself(body: bytes) -> None:
    assert only(framed(body)).field == "query"


def test_a_deep_value_inside_a_field_is_refused_without_recursion() -> None:
    body = msgspec.msgpack.encode(VALUES)[:-1] + b"\x91" * 50_000
    assert only(framed(body)).field == "query.attempt.attempt"


def test_a_refused_value_is_shown_in_part() -> None:
    body = msgspec.msgpack.encode(["x" * 60_000, *VALUES[1:]])
    assert only(framed(body)).value == "x" * 80
    huge = msgspec.msgpack.encode(["x" * 600_000, *VALUES[1:]])
    assert only(framed(huge)).value == f"a value in {len(huge)} bytes"


def test_a_refused_value_of_a_type_of_its_own_is_named_by_its_type() -> None:
    extension = only(packed([*VALUES[:5], msgspec.msgpack.Ext(5, b"x" * 90)]))
    assert extension.value == "a value of type Ext"
    stamp = only(packed([*VALUES[:5], datetime(2026, 1, 1, tzinfo=UTC)]))
    assert stamp.value == "a value of type datetime"


@pytest.mark.parametrize("length", [0, 1, wire.FRAME_BYTES_MOST + 1, 2**32 - 1])
def test_a_bad_length_ends_the_connection_before_anything_is_held(length: int) -> None:
    decoder = wire.Decoder()
    with pytest.raises(RemoteProtocolError, match=f"frame length = {length}: expected 2 to"):
        decoder.feed(length.to_bytes(4, "big"))
    with pytest.raises(RemoteProtocolError, match="frame length"):
        decoder.feed(wire.frame(GOOD))


def test_the_longest_frame_is_read() -> None:
    body = bytes(wire.FRAME_BYTES_MOST - 2)
    assert only(framed(body)).field == "query"


def drain(stream: bytes, size: int) -> tuple[list[Message | wire.Malformed], bool]:
    """What a peer's bytes are, fed `size` at a time, and whether the connection died of them."""
    decoder = wire.Decoder()
    found: list[Message | wire.Malformed] = []
    for start in range(0, len(stream), size):
        try:
            found += decoder.feed(stream[start : start + size])
        except RemoteProtocolError:
            return found, True
    return found, False


@given(st.binary(max_size=300))
@example(b"\x00\x00\x00\x02\x01\x08")
def test_random_bytes_raise_nothing_else(stream: bytes) -> None:
    whole, whole_died = drain(stream, max(1, len(stream)))
    bytewise, bytewise_died = drain(stream, 1)
    assert whole_died == bytewise_died
    assert whole_died or whole == bytewise


@given(st.binary(max_size=120), st.integers(0, 20))
def test_random_bodies_harm_only_themselves(body: bytes, tag: int) -> None:
    found = wire.Decoder().feed(framed(body, tag) + wire.frame(GOOD))
    assert len(found) == 2
    assert found[1] == GOOD


@given(strategies.messages(), st.data())
def test_a_truncated_frame_is_waited_for(message: Message, data: st.DataObject) -> None:
    framed_message = wire.frame(message)
    cut = data.draw(st.integers(0, len(framed_message) - 1))
    decoder = wire.Decoder()
    assert decoder.feed(framed_message[:cut]) == []
    assert decoder.feed(framed_message[cut:]) == [message]


@given(strategies.messages(), st.data())
def test_a_truncated_body_is_refused(message: Message, data: st.DataObject) -> None:
    tag_and_body = wire.frame(message)[5:]
    cut = data.draw(st.integers(1, len(tag_and_body) - 1))
    only(framed(tag_and_body[1:cut], tag_and_body[0]))


@given(strategies.messages(), st.data())
def test_a_flipped_bit_yields_a_message_within_bounds_or_a_refusal(
    message: Message, data: st.DataObject
) -> None:
    changed = bytearray(wire.frame(message))
    bit = data.draw(st.integers(32, len(changed) * 8 - 1))
    changed[bit // 8] ^= 1 << bit % 8
    (found,) = wire.Decoder().feed(bytes(changed))
    if not isinstance(found, wire.Malformed):
        assert wire.Decoder().feed(wire.frame(found)) == [found]

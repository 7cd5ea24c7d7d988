"""What travels: memory descriptions and notices, strict against everything else."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.errors import RemoteProtocolError
from pushkv.core.ids import AttemptId, EngineId, Incarnation, TransferId, Worker
from pushkv.transport import Arrival, Permit, Region, Write
from pushkv_nixl import _arrivals, _codec
from pushkv_nixl._regions import RegionTable

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
UINT64 = st.integers(0, 2**64 - 1)
CONSUMER = Worker(EngineId("D"), Incarnation(2**64 - 1), 3)
ATTEMPT = AttemptId(CONSUMER.engine, CONSUMER.incarnation, 3, 1, TransferId("t"), 9)


def write(attempt: AttemptId = ATTEMPT, part: int = 4, token: int = 5, length: int = 6) -> Write:
    segments = np.array([[4096, length]], np.uint64)
    return Write(CONSUMER, attempt, part, token, segments, segments, Permit())


def notice(
    piece: int = 0, pieces: int = 1, part: int = 4, token: int = 5, length: int = 6
) -> bytes:
    return _codec.encode_notice(write(ATTEMPT, part, token, length), piece, pieces)


@given(TEXT, UINT64, UINT64, UINT64, TEXT, UINT64, UINT64, UINT64)
def test_a_notice_says_what_the_write_was(
    engine: str,
    incarnation: int,
    rank: int,
    producer_rank: int,
    transfer: str,
    attempt: int,
    part: int,
    token: int,
) -> None:
    name = AttemptId(
        EngineId(engine),
        Incarnation(incarnation),
        rank,
        producer_rank,
        TransferId(transfer),
        attempt,
    )
    data = _codec.encode_notice(write(name, part, token, 77), 1, 2)
    assert _codec.decode_notice(data) == _codec.Notice(name, part, token, 77, 1, 2)


@given(st.one_of(st.binary(max_size=80), st.binary(max_size=80).map(lambda end: b"pkn\x01" + end)))
def test_garbage_is_no_notice(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        _codec.decode_notice(data)


@pytest.mark.parametrize(
    "change",
    [{0: 5}, {1: -1}, {1: "2"}, {5: 1.5}, {8: -1}, {9: 1}, {9: 0, 10: 0}, {11: 0}, {10: None}],
)
def test_a_notice_with_a_wrong_field_is_refused(change: dict[int, object]) -> None:
    fields = list(msgspec.msgpack.decode(notice()[4:]))
    for place, value in change.items():
        fields[place : place + 1] = [value]
    with pytest.raises(RemoteProtocolError):
        _codec.decode_notice(b"pkn\x01" + msgspec.msgpack.encode(fields))


def test_names_too_long_for_a_notice_are_refused_where_it_is_made() -> None:
    long = AttemptId(CONSUMER.engine, CONSUMER.incarnation, 3, 1, TransferId("t" * 5000), 9)
    with pytest.raises(ValueError, match="too long"):
        _codec.encode_notice(write(long), 0, 1)


def memory() -> bytes:
    table = RegionTable.of([Region(4096, 100), Region(1 << 40, 1 << 30, 2)])
    return _codec.encode_memory("1.5.1", "UCX", "name", table, b"blob")


def test_memory_comes_back() -> None:
    found = _codec.decode_memory(memory())
    assert (found.library, found.backend, found.agent) == ("1.5.1", "UCX", "name")
    assert found.metadata == b"blob"
    assert found.regions.starts.tolist() == [4096, 1 << 40]
    assert found.regions.lengths.tolist() == [100, 1 << 30]
    assert found.regions.devices.tolist() == [-1, 2]


@given(st.data())
def test_damaged_memory_is_refused(data: st.DataObject) -> None:
    good = memory()
    at = data.draw(st.integers(0, len(good) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda each: each != good[at]))
    for bad in (good[:at], good[:at] + bytes([value]) + good[at + 1 :], good + b"\x00"):
        with pytest.raises(RemoteProtocolError):
            _codec.decode_memory(bad)


def test_well_wrapped_nonsense_is_refused() -> None:
    for body in (
        ["1.5.1", "UCX", "name", [(0, 10, -1)], b""],
        ["1.5.1", "UCX", "name", [(4096, 2**64 - 1, -1)], b""],
        ["1.5.1", "UCX", "name", [(4096, 10, -2)], b""],
        ["1.5.1", "UCX", "name", [(4096, 10)], b""],
        ["1.5.1", "UCX", "name", [], b"", 1],
        ["1.5.1", "UCX", "name", []],
        {"library": "1.5.1"},
    ):
        data = msgspec.msgpack.encode(body)
        with pytest.raises(RemoteProtocolError):
            _codec.decode_memory(_codec._MEMORY + _codec._digest(data) + data)


def test_memory_beyond_the_limit_is_not_looked_at() -> None:
    with pytest.raises(RemoteProtocolError, match="at most"):
        _codec.decode_memory(b"\x00" * (_codec.MEMORY_BYTES_MAX + 1))


def test_a_part_arrives_with_its_last_piece_in_any_order_and_twice_if_sent_twice() -> None:
    arrivals = _arrivals.Arrivals(CONSUMER)
    whole = Arrival(ATTEMPT, 4, 5, 6)
    assert arrivals.take("P", notice()) == whole
    assert arrivals.take("P", notice(2, 3)) is None
    assert arrivals.take("P", notice(2, 3)) is None
    assert arrivals.take("P", notice(0, 3)) is None
    assert arrivals.take("P", notice(1, 3)) == whole
    assert arrivals.take("P", notice(1, 3)) is None
    assert arrivals.dropped == 0


def test_pieces_of_different_writes_and_senders_never_add_up() -> None:
    arrivals = _arrivals.Arrivals(CONSUMER)
    assert arrivals.take("P", notice(0, 2)) is None
    for other in (
        notice(1, 2, part=5),
        notice(1, 2, token=6),
        notice(1, 2, length=7),
        notice(1, 3),
    ):
        assert arrivals.take("P", other) is None
    assert arrivals.take("Q", notice(1, 2)) is None
    assert arrivals.take("P", notice(1, 2)) is not None


def test_notices_for_another_incarnation_or_rank_are_dropped() -> None:
    for worker in (
        Worker(CONSUMER.engine, Incarnation(1), 3),
        Worker(CONSUMER.engine, CONSUMER.incarnation, 0),
        Worker(EngineId("E"), CONSUMER.incarnation, 3),
    ):
        arrivals = _arrivals.Arrivals(worker)
        assert arrivals.take("P", notice()) is None
        assert arrivals.dropped == 1


def test_parts_that_never_become_whole_are_given_up_oldest_first() -> None:
    arrivals = _arrivals.Arrivals(CONSUMER)
    for part in range(_arrivals.PARTIAL_MAX + 1):
        assert arrivals.take("P", notice(0, 2, part=part)) is None
    assert arrivals.dropped == 1
    assert arrivals.take("P", notice(1, 2, part=0)) is None
    assert arrivals.take("P", notice(1, 2, part=_arrivals.PARTIAL_MAX)) is not None
    assert arrivals.take("P", notice(0, _arrivals.PIECES_MAX + 1)) is None
    assert arrivals.dropped == 3

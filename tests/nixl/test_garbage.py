"""What a peer may send of its memory, whole and damaged, under a digest that is right."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pushkv.core.errors import RemoteProtocolError
from pushkv.core.ids import EngineId, Incarnation, Worker
from pushkv.transport import Region
from pushkv_nixl import NixlTransport, _codec
from pushkv_nixl._metadata import check_metadata, has_known_form
from pushkv_nixl._regions import RegionTable

pytestmark = pytest.mark.nixl

AGENT = "pushkv/e/0000000000000001/0"
REGIONS = RegionTable.of([Region(4096, 100), Region(1 << 40, 1 << 30)])


def field(tag: bytes, value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        value = value.to_bytes(8, "little")
    elif isinstance(value, str):
        value = value.encode()
    return tag + len(value).to_bytes(8, "little") + value + b"|"


def metadata(
    *, agent: str = AGENT, backend: str = "UCX", count: int = 1, **descriptor: int
) -> bytes:
    place = {"address": 4096, "length": 100, **descriptor}
    element = b"".join(each.to_bytes(8, "little") for each in (*place.values(), 0)) + b"opaque|key"
    return b"".join(
        (
            b"nixlSerDes|",
            field(b"Agent", agent),
            field(b"Conns", 1),
            field(b"t", backend),
            field(b"c", b"|opaque|" * 9),
            field(b"", "MemSection"),
            field(b"nixlSecElms", 1),
            field(b"bknd", backend),
            field(b"nixlDList", "nixlSDList"),
            field(b"t", b"\0\0\0\0"),
            field(b"n", count),
            field(b"", element) * count,
        )
    )


def refused(data: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as error:
        check_metadata(data, AGENT, "UCX", REGIONS)
    assert len(str(error.value)) < 500
    return str(error.value)


def test_the_form_that_is_known_is_that_of_the_nixl_that_runs() -> None:
    memory = np.zeros(10_000, np.uint8)
    worker = Worker(EngineId("e"), Incarnation(1), 0)
    transport = NixlTransport()
    regions = [Region(memory.ctypes.data, 4_000), Region(memory.ctypes.data + 5_000, 5_000)]
    transport.start(worker, regions, time.monotonic_ns, lambda: None)
    try:
        ours = _codec.decode_memory(transport.memory())
        check_metadata(ours.metadata, AGENT, ours.backend, ours.regions)
        with pytest.raises(RemoteProtocolError, match="memory it declared"):
            check_metadata(ours.metadata, AGENT, ours.backend, REGIONS)
        for at in range(len(ours.metadata)):
            assert not has_known_form(ours.metadata[:at], AGENT, ours.backend, ours.regions)
    finally:
        assert transport.close(5)


def test_metadata_of_the_known_form_passes() -> None:
    for count in (0, 1, 7):
        check_metadata(metadata(count=count), AGENT, "UCX", REGIONS)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "its magic"),
        (metadata(agent="pushkv/other/0000000000000001/0"), "Agent"),
        (metadata(backend="LIBFABRIC"), "NIXL metadata: t"),
        (metadata(address=4095), "memory it declared"),
        (metadata(length=101), "memory it declared"),
        (metadata(length=2**64 - 1), "memory it declared"),
        (metadata(address=2**64 - 1, length=2**64 - 1), "memory it declared"),
        (metadata() + b"\0", "length"),
        (metadata().replace(field(b"Conns", 1), field(b"Conns", 2**63)), "Conns"),
        (metadata().replace(field(b"n", 1), field(b"n", 2)), "element"),
        (metadata().replace(field(b"n", 1), field(b"n", 2**62)), "NIXL metadata: n"),
        (metadata().replace(field(b"nixlSecElms", 1), field(b"nixlSecElms", 99)), "nixlSecElms"),
        (metadata().replace(field(b"c", b"|opaque|" * 9), b"c" + b"\xff" * 80), "bytes"),
        (metadata().replace(b"nixlSDList", b"nixlXDList"), "nixlDList"),
    ],
)
def test_metadata_of_another_form_is_refused_by_name(data: bytes, named: str) -> None:
    assert named in refused(data)


@given(st.integers(0, len(metadata()) - 1), st.binary(min_size=1, max_size=9), st.booleans())
def test_damage_is_refused_or_lies_in_what_is_opaque(at: int, more: bytes, insert: bool) -> None:
    good = metadata()
    damaged = good[:at] + more + good[at if insert else at + len(more) :]
    try:
        check_metadata(damaged, AGENT, "UCX", REGIONS)
    except RemoteProtocolError:
        return
    assert len(damaged) == len(good)
    for tag in (b"Agent", b"Conns", b"MemSection", b"nixlSecElms", b"bknd", AGENT.encode()):
        assert damaged.count(tag) >= good.count(tag)


body = st.tuples(
    st.text(max_size=8),
    st.text(max_size=8),
    st.text(max_size=8),
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**64 - 1),
            st.integers(-(2**63), 2**64 - 1),
            st.integers(-(2**63), 2**64 - 1),
        ),
        max_size=4,
    ),
    st.binary(max_size=20),
)


@given(body)
@example(("1", "UCX", "a", [(4096, 10, 2**63)], b""))
@example(("1", "UCX", "a", [(2**64 - 1, 2**64 - 1, 0)], b""))
def test_any_regions_are_memory_or_refused(form: tuple[object, ...]) -> None:
    data = msgspec.msgpack.encode(form)
    whole = _codec._MEMORY + _codec._digest(data) + data
    try:
        found = _codec.decode_memory(whole)
    except RemoteProtocolError:
        return
    for start, length in zip(found.regions.starts, found.regions.lengths, strict=True):
        assert int(start) + int(length) <= 2**64
        assert found.regions.holds(int(start), int(length))


def test_what_lies_within_a_region_is_held_and_nothing_else() -> None:
    for address, length, held in (
        (4096, 100, True),
        (4196, 0, True),
        (4197, 0, False),
        (4095, 1, False),
        (4100, 97, False),
        ((1 << 40) + 5, (1 << 30) - 5, True),
        (1 << 64, 0, False),
        (-1, 1, False),
        (4096, -1, False),
    ):
        assert REGIONS.holds(address, length) is held, (address, length)

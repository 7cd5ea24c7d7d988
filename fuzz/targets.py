"""One function of bytes per decoder. Each returns, or the decoder has a fault.

What a decoder may raise is caught here by name; whatever else comes out, an assertion of a target
included, is a finding. The corpus in `fuzz/corpus/TARGET` is run by the tests, too.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

from pushkv import wire
from pushkv.block_map import block_map
from pushkv.core.errors import PushKVError, RemoteProtocolError
from pushkv.core.messages import Message
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion, Cells, split_memory
from pushkv.transport import Region
from pushkv_nixl import _codec as nixl
from pushkv_nixl._metadata import check_metadata
from pushkv_nixl._regions import RegionTable
from pushkv_vllm.params import read_params

from .peer import converse

__all__ = ["TARGETS"]

LOCAL = CacheLayout(
    groups=(CacheGroup(16, (CacheRegion(1 << 20, 256, 64), CacheRegion(1 << 30, 256, 64))),),
    dtype="uint8",
    kv_layout="any",
)


LOCAL_CELLS = CacheLayout(
    groups=(CacheGroup(16, LOCAL.groups[0].regions, Cells("HN", 2, 16)),),
    dtype="uint8",
    kv_layout="any",
)


def _read(stream: bytes, size: int) -> tuple[list[Message | wire.Malformed], bool]:
    decoder = wire.Decoder()
    found: list[Message | wire.Malformed] = []
    for start in range(0, len(stream), size):
        try:
            found += decoder.feed(stream[start : start + size])
        except RemoteProtocolError:
            return found, True
    return found, False


def stream(data: bytes) -> None:
    """A connection's bytes: cuts change nothing, and what is read is within its bounds."""
    whole, died = _read(data, max(1, len(data)))
    cut, cut_died = _read(data, 7)
    assert died == cut_died
    assert died or repr(whole) == repr(cut), "NaN is not equal to itself"
    for item in whole:
        if isinstance(item, wire.Malformed):
            assert len(repr(item)) < 4_000
        else:
            assert wire.Decoder().feed(wire.frame(item)) == [item]


def body(data: bytes) -> None:
    """One well-framed body, whose first byte is the tag."""
    if data:
        head = (len(data) + 1).to_bytes(4, "big") + bytes((wire.PROTOCOL,))
        stream(head + data)


def _brief(refusal: RemoteProtocolError) -> None:
    """What a stranger chose fills no log."""
    assert len(str(refusal)) < 4_000


def params(data: bytes) -> None:
    """A request's `kv_transfer_params`, as JSON."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        leg = read_params(value)
    except RemoteProtocolError as refusal:
        _brief(refusal)
    else:
        if leg is not None:
            assert hash(leg) == hash(read_params(value))


def layout(data: bytes) -> None:
    """HELLO's memory; a layout that is one maps blocks to its own memory or refuses."""
    try:
        theirs, _ = split_memory(data)
    except RemoteProtocolError as refusal:
        _brief(refusal)
        return
    assert CacheLayout.decode(theirs.encode()) == theirs
    _map(theirs)


def layout_alone(data: bytes) -> None:
    """A layout without what surrounds it."""
    try:
        theirs = CacheLayout.decode(data)
    except RemoteProtocolError as refusal:
        _brief(refusal)
        return
    assert CacheLayout.decode(theirs.encode()) == theirs
    _map(theirs)


def _map(theirs: CacheLayout) -> None:
    for ours in (LOCAL, LOCAL_CELLS):
        _map_from(ours, theirs)


def _map_from(ours: CacheLayout, theirs: CacheLayout) -> None:
    with contextlib.suppress(PushKVError):
        source, destination = block_map(ours, theirs, ((1, 2, 63),), 0, ((0, 5, 9),), 0, 0, 48)
        assert source[:, 1].tolist() == destination[:, 1].tolist()
        regions = [region for group in theirs.groups for region in group.regions]
        for address, length in destination.tolist():
            assert any(
                region.address <= address
                and address + length <= region.address + region.length_bytes
                for region in regions
            ), "a WRITE outside of the peer's own regions"


def nixl_memory(data: bytes) -> None:
    """NIXL's part of HELLO, under a digest that is right."""
    with contextlib.suppress(RemoteProtocolError):
        memory = nixl.decode_memory(nixl._MEMORY + nixl._digest(data) + data)
        assert nixl.encode_memory(
            memory.library, memory.backend, memory.agent, memory.regions, memory.metadata
        )


def nixl_metadata(data: bytes) -> None:
    """NIXL's own metadata, as far as it is looked at before NIXL does."""
    regions = RegionTable.of([Region(4096, 4096)])
    for each in (data, b"nixlSerDes|" + data):
        with contextlib.suppress(RemoteProtocolError):
            check_metadata(each, "pushkv/e/0000000000000001/0", "UCX", regions)


def nixl_notice(data: bytes) -> None:
    """What rides on a WRITE."""
    for each in (data, nixl._NOTICE + data):
        with contextlib.suppress(RemoteProtocolError):
            notice = nixl.decode_notice(each)
            assert notice.piece < notice.pieces


TARGETS: dict[str, Callable[[bytes], None]] = {
    "stream": stream,
    "body": body,
    "peer": converse,
    "params": params,
    "layout": layout,
    "layout_alone": layout_alone,
    "nixl_memory": nixl_memory,
    "nixl_metadata": nixl_metadata,
    "nixl_notice": nixl_notice,
}
"""By name of its corpus."""

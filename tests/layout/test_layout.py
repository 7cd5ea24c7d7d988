"""What a layout says of itself, to the registration and to a peer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.errors import ConfigurationError, RemoteProtocolError
from pushkv.layout import (
    REGIONS_MOST,
    CacheGroup,
    CacheLayout,
    CacheRegion,
    difference,
    join_memory,
    split_memory,
)
from pushkv.testing.strategies import cache_layouts
from pushkv.transport import Region
from pushkv.wire import (
    GROUPS_MOST,
    MEMORY_BYTES_MOST,
    PAIR_KEY_LENGTH_MOST,
    PAIR_VALUE_LENGTH_MOST,
    PAIRS_MOST,
)


def layout(*regions: CacheRegion, **changes: Any) -> CacheLayout:
    regions = regions or (CacheRegion(4096, 100, 8), CacheRegion(8192, 100, 8))
    plain = CacheLayout(
        (CacheGroup(16, regions),),
        "float16",
        "HND",
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
    )
    return attrs.evolve(plain, **changes)


def two_groups() -> CacheLayout:
    return layout(
        groups=(
            CacheGroup(
                16, (CacheRegion(0, 100, 8), CacheRegion(800, 100, 8), CacheRegion(9, 7, 1))
            ),
            CacheGroup(32, (CacheRegion(9000, 50, 4),)),
        )
    )


def test_the_description_is_all_that_must_agree() -> None:
    assert two_groups().description() == (
        ("block_tokens[0]", "16"),
        ("block_tokens[1]", "32"),
        ("dtype", "float16"),
        ("groups", "2"),
        ("kv_layout", "HND"),
        ("pipeline_parallel_size", "2"),
        ("region_block_bytes[0]", "2 x 100, 1 x 7"),
        ("region_block_bytes[1]", "1 x 50"),
        ("regions[0]", "3"),
        ("regions[1]", "1"),
        ("tensor_parallel_rank", "0"),
        ("tensor_parallel_size", "2"),
    )


def test_where_the_blocks_lie_and_how_many_need_not_agree() -> None:
    plain = layout(CacheRegion(4096, 100, 8))
    elsewhere = layout(CacheRegion(70_000, 100, 5, 3, 128))
    assert elsewhere != plain
    assert elsewhere.description() == plain.description()
    assert elsewhere.digest() == plain.digest()
    assert len(plain.digest()) == 16


@pytest.mark.parametrize(
    "changed",
    [
        layout(groups=(CacheGroup(32, layout().groups[0].regions),)),
        layout(groups=(CacheGroup(16, layout().groups[0].regions[:1]),)),
        layout(groups=layout().groups * 2),
        layout(CacheRegion(4096, 100, 8), CacheRegion(8192, 50, 8)),
        layout(CacheRegion(4096, 50, 8), CacheRegion(8192, 100, 8)),
        layout(dtype="bfloat16"),
        layout(kv_layout="NHD"),
        layout(tensor_parallel_size=4),
        layout(tensor_parallel_rank=1),
    ],
)
def test_every_difference_in_geometry_changes_the_description(changed: CacheLayout) -> None:
    assert changed.description() != layout().description()
    assert difference(layout().description(), changed.description()) is None or (
        changed.digest() != layout().digest()
    )


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"kv_layout": "NHD"}])
def test_what_all_stages_must_agree_in_is_in_the_digest(changes: dict[str, str]) -> None:
    assert layout(**changes).digest() != layout().digest()


def test_a_stage_agrees_with_an_end_that_holds_all_layers() -> None:
    whole = layout(CacheRegion(0, 100, 8), CacheRegion(0, 100, 8), pipeline_parallel_size=1)
    stage = layout(CacheRegion(0, 100, 8))
    assert difference(whole.description(), stage.description()) is None
    assert whole.digest() == stage.digest()
    alone = layout(CacheRegion(0, 100, 8), pipeline_parallel_size=1)
    assert difference(whole.description(), alone.description()) == "region_block_bytes[0]"


def test_the_largest_description_fits_into_a_hello() -> None:
    sizes = [7, 1_000_000_007] * (REGIONS_MOST // GROUPS_MOST // 2)
    group = CacheGroup(16, tuple(CacheRegion(0, size, 1) for size in sizes))
    largest = layout(groups=(group,) * GROUPS_MOST)
    pairs = largest.description()
    assert len(pairs) <= PAIRS_MOST
    assert max(len(key) for key, _ in pairs) <= PAIR_KEY_LENGTH_MOST
    assert max(len(value) for _, value in pairs) <= PAIR_VALUE_LENGTH_MOST
    assert len(join_memory(largest, b"")) < MEMORY_BYTES_MOST


def test_a_long_list_of_sizes_is_cut_but_still_compared_whole() -> None:
    def alternating(last: int) -> CacheLayout:
        sizes = [*([4096, 8192] * 100), last]
        return layout(*(CacheRegion(0, size, 1) for size in sizes))

    value = dict(alternating(1).description())["region_block_bytes[0]"]
    assert value.startswith("1 x 4096, 1 x 8192, ")
    assert len(value) < 600
    assert alternating(1).description() != alternating(2).description()


def test_each_byte_is_registered_once() -> None:
    found = layout(
        groups=(
            # K and V interleaved in one tensor; then the same tensor for another group.
            CacheGroup(16, (CacheRegion(0, 10, 5, -1, 20), CacheRegion(10, 10, 5, -1, 20))),
            CacheGroup(32, (CacheRegion(0, 20, 5),)),
            # Touches the first without overlap; then the same addresses on a device.
            CacheGroup(16, (CacheRegion(100, 10, 2), CacheRegion(100, 10, 2, 0))),
        )
    ).regions_to_register()
    assert found == [Region(0, 100, -1), Region(100, 20, -1), Region(100, 20, 0)]


def test_a_region_inside_another_does_not_shorten_it() -> None:
    found = layout(CacheRegion(0, 100, 5), CacheRegion(10, 10, 2), CacheRegion(400, 100, 2))
    assert found.regions_to_register() == [Region(0, 600)]


@given(cache_layouts())
def test_registered_memory_covers_every_block_without_overlap(found: CacheLayout) -> None:
    spans = [
        (each.device, each.address, each.address + each.length_bytes)
        for each in found.regions_to_register()
    ]
    for before, after in pairwise(spans):
        assert before[0] != after[0] or before[2] <= after[1]
    for group in found.groups:
        for region in group.regions:
            last = region.address + (region.block_count - 1) * region.block_stride_bytes
            assert any(
                device == region.device
                and start <= region.address
                and last + region.block_bytes <= end
                for device, start, end in spans
            )


@given(cache_layouts(), st.binary(max_size=50))
def test_a_layout_reaches_the_peer_whole(sent: CacheLayout, transport: bytes) -> None:
    received = CacheLayout.decode(sent.encode())
    assert received == sent
    assert received.digest() == sent.digest()
    assert received.groups[0].block_count == sent.groups[0].block_count
    assert split_memory(join_memory(sent, transport)) == (sent, transport)


@given(cache_layouts(), st.data())
def test_damaged_memory_is_refused_or_a_valid_layout(
    sent: CacheLayout, data: st.DataObject
) -> None:
    memory = bytearray(join_memory(sent, b"transport"))
    bit = data.draw(st.integers(0, len(memory) * 8 - 1))
    memory[bit // 8] ^= 1 << bit % 8
    try:
        received, _ = split_memory(bytes(memory))
    except RemoteProtocolError:
        pass  # refused, and by nothing but this error
    else:
        assert CacheLayout.decode(received.encode()) == received
    with pytest.raises(RemoteProtocolError):
        split_memory(join_memory(sent, b"")[: data.draw(st.integers(0, len(sent.encode())))])


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    for decode in (CacheLayout.decode, split_memory):
        with pytest.raises(RemoteProtocolError):
            decode(data)


GROUP = [16, [[4096, 100, 8, -1, 100]], [], [0], 1, 0]
GOOD = [[GROUP], "float16", "HND", 2, 1, 1, 0]


def with_region(**changes: int) -> list[object]:
    region = {"address": 4096, "bytes": 100, "count": 8, "device": -1, "stride": 100} | changes
    return with_group(regions=[list(region.values())])


def with_group(**changes: object) -> list[object]:
    names = ("block_tokens", "regions", "cells", "layers", "layers_total", "window_tokens")
    group = dict(zip(names, GROUP, strict=True)) | changes
    return [[list(group.values())], *GOOD[1:]]


def with_cells(*cells: object) -> list[object]:
    return with_group(
        regions=[[4096, 64, 8, -1, 64]], cells=[[*cells, 0][:5]], layers=[0], layers_total=1
    )


@pytest.mark.parametrize(
    ("values", "field", "value"),
    [
        (with_region(address=-1), "layout.groups[0].regions[0].address", -1),
        (with_region(address=2**63), "layout.groups[0].regions[0].address", 2**63),
        (with_region(address=2**63 - 800), "layout.groups[0].regions[0].block_count", 8),
        (with_region(bytes=0), "layout.groups[0].regions[0].block_bytes", 0),
        (with_region(count=0), "layout.groups[0].regions[0].block_count", 0),
        (with_region(count=2**32 + 1), "layout.groups[0].regions[0].block_count", 2**32 + 1),
        (with_region(device=-2), "layout.groups[0].regions[0].device", -2),
        (with_region(stride=99), "layout.groups[0].regions[0].block_stride_bytes", 99),
        (with_group(block_tokens=0), "layout.groups[0].block_tokens", 0),
        (with_group(regions=[]), "layout.groups[0].regions", ()),
        (with_group(layers=[]), "layout.groups[0].layers", ()),
        (with_group(layers=[2**17]), "layout.groups[0].layers", 2**17),
        (with_group(layers_total=0), "layout.groups[0].layers_total", 0),
        (with_group(window_tokens=2**32), "layout.groups[0].window_tokens", 2**32),
        (with_cells("XY", 2, 16, 1), "layout.groups[0].axes", "XY"),
        (with_cells("HN", 2, 16, 2), "layout.groups[0].axes", "HN"),
        (with_cells("HNK", 2, 16, 1), "layout.groups[0].axes", "HNK"),
        (with_cells("HN", 0, 16, 1), "layout.groups[0].heads_total", 0),
        (with_cells("HTN", 2, 16, 2), "layout.groups[0].element_bytes", 0),
        (with_cells("HN", 2, 16, 1, 4), "layout.groups[0].element_bytes", 4),
        (with_cells("HTN", 2, 8, 2, 3), "layout.element_bytes", 3),
        (with_cells("HN", 3, 16, 1), "layout.heads_total", 3),
        (with_cells("HN", 2, 5, 1), "layout.groups[0].page_tokens", 5),
        (with_cells("HNK", 2, 16, 3), "layout.groups[0].planes", 3),
        (with_cells("HN", 16, 16, 1), "layout.block_bytes", 64),
        ([[], *GOOD[1:]], "layout.groups", 0),
        ([GOOD[0], "", *GOOD[2:]], "layout.dtype", ""),
        ([*GOOD[:3], 2, 2, 1, 0], "layout.tensor_parallel_rank", 2),
        ([*GOOD[:3], 0, 0, 1, 0], "layout.tensor_parallel_size", 0),
        ([*GOOD[:3], 1, 0, 1, 1], "layout.pipeline_parallel_rank", 1),
        (GOOD[:-1], "layout", "6 elements"),
    ],
)
def test_a_peer_s_impossible_layout_is_refused_by_name(
    values: list[object], field: str, value: object
) -> None:
    assert CacheLayout.decode(msgspec.msgpack.encode(GOOD)).groups[0].block_tokens == 16
    with pytest.raises(RemoteProtocolError) as refusal:
        CacheLayout.decode(msgspec.msgpack.encode(values))
    assert (refusal.value.field, refusal.value.value) == (field, value)


def test_too_many_regions_are_refused() -> None:
    group = CacheGroup(16, (CacheRegion(0, 1, 1),) * (REGIONS_MOST // 2 + 1))
    with pytest.raises(ConfigurationError, match="regions = 4098: expected an integer from 1 to"):
        layout(groups=(group, group))


def test_memory_too_long_for_a_hello_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"memory = .*: expected at most 4194304"):
        join_memory(layout(), bytes(MEMORY_BYTES_MOST))

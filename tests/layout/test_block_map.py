"""The block map moves every byte asked for, from the right block to the right one, and no other."""

from __future__ import annotations

import ctypes

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pushkv.block_map import block_map
from pushkv.core.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from pushkv.core.ids import Blocks
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion
from pushkv.transport import Segments

Memory = NDArray[np.uint8]


@attrs.frozen
class Shape:
    """What both ends have in common: per group, tokens per block and bytes per block by region."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]


@attrs.frozen(eq=False)
class End:
    """One end: real memory with a layout in it."""

    memory: Memory
    layout: CacheLayout


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    sizes = st.lists(st.integers(1, 24), min_size=1, max_size=3).map(tuple)
    return Shape(
        tuple(
            draw(st.lists(st.tuples(st.sampled_from((1, 2, 4, 8)), sizes), min_size=1, max_size=3))
        )
    )


def make_end(
    shape: Shape, counts: list[int], padding: list[int], gap: int, fill: Memory | None = None
) -> End:
    """Lay the shape out: a block count per group, padding after each block by region, a gap."""
    at, placed = 0, []
    for (tokens, sizes), count in zip(shape.groups, counts, strict=True):
        regions = []
        for index, size in enumerate(sizes):
            stride = size + padding[index % len(padding)]
            regions.append((at, size, count, stride))
            at += count * stride + gap
        placed.append((tokens, regions))
    memory = np.zeros(at, dtype=np.uint8) if fill is None else np.resize(fill, at)
    base = memory.ctypes.data
    groups = tuple(
        CacheGroup(
            tokens,
            tuple(
                CacheRegion(base + offset, size, count, -1, stride)
                for offset, size, count, stride in regions
            ),
        )
        for tokens, regions in placed
    )
    return End(memory, CacheLayout(groups, "uint8", "HND"))


@st.composite
def ends(draw: st.DrawFn, shape: Shape, needed: list[int], seed: int) -> End:
    """An end with at least `needed` blocks per group, full of bytes that `seed` decides."""
    counts = [count + draw(st.integers(0 if count else 1, 6)) for count in needed]
    padding = draw(st.lists(st.sampled_from((0, 0, 0, 3)), min_size=1, max_size=3))
    fill = np.random.default_rng(seed).integers(0, 256, 8_192, dtype=np.uint8)
    return make_end(shape, counts, padding, draw(st.sampled_from((0, 5))), fill)


@st.composite
def ids(draw: st.DrawFn, end: End, needed: list[int]) -> Blocks:
    """Distinct block ids for each group: runs up, runs down, or scattered."""
    found = []
    for group, count in zip(end.layout.groups, needed, strict=True):
        chosen = draw(st.permutations(range(group.block_count)))[:count]
        order = draw(st.sampled_from(("scattered", "up", "down")))
        found.append(
            tuple(chosen if order == "scattered" else sorted(chosen, reverse=order == "down"))
        )
    return tuple(found)


def block_of(end: End, place: int, region: int, block: int) -> slice:
    """Where the bytes of a block lie in an end's memory, computed the slow way."""
    where = end.layout.groups[place].regions[region]
    first = where.address - end.memory.ctypes.data + block * where.block_stride_bytes
    return slice(first, first + where.block_bytes)


def move(source: Segments, destination: Segments) -> None:
    assert source[:, 1].tolist() == destination[:, 1].tolist()
    for (origin, length), (target, _) in zip(source.tolist(), destination.tolist(), strict=True):
        ctypes.memmove(target, origin, length)


def region_at(end: End, address: int) -> tuple[int, int]:
    return next(
        (place, index)
        for place, group in enumerate(end.layout.groups)
        for index, region in enumerate(group.regions)
        if region.address <= address < region.address + region.length_bytes
    )


def mergeable(target: End, source: Segments, destination: Segments) -> list[tuple[int, int]]:
    """Pairs of rows of one region, however far apart, of which one begins where the other ends."""
    begins = {
        (ours, theirs): row
        for row, (ours, theirs) in enumerate(
            zip(source[:, 0].tolist(), destination[:, 0].tolist(), strict=True)
        )
    }
    found = []
    for row, (ours, theirs, length) in enumerate(
        zip(source[:, 0].tolist(), destination[:, 0].tolist(), source[:, 1].tolist(), strict=True)
    ):
        after = begins.get((ours + length, theirs + length))
        if after is not None and region_at(target, theirs) == region_at(target, theirs + length):
            found.append((row, after))
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_byte_asked_for_arrives_and_no_other_changes(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    unit = max(tokens for tokens, _ in shape.groups)  # a multiple of every group's block
    start = unit * data.draw(st.integers(0, 2))
    tokens = data.draw(st.integers(0, 3 * unit))
    source_start = unit * data.draw(st.integers(0, start // unit))
    target_start = unit * data.draw(st.integers(0, start // unit))

    def needed(first: int) -> list[int]:
        # At times more than the range: later tokens may have blocks already.
        later = data.draw(st.integers(0, 1))
        return [(start - first) // size + -(-tokens // size) + later for size, _ in shape.groups]

    source_needs, target_needs = needed(source_start), needed(target_start)
    source = data.draw(ends(shape, source_needs, seed=1))
    target = data.draw(ends(shape, target_needs, seed=2))
    source_blocks = data.draw(ids(source, source_needs))
    target_blocks = data.draw(ids(target, target_needs))

    expected = target.memory.copy()
    for place, (block_tokens, sizes) in enumerate(shape.groups):
        for token in range(start, start + tokens, block_tokens):
            ours = source_blocks[place][(token - source_start) // block_tokens]
            theirs = target_blocks[place][(token - target_start) // block_tokens]
            for region in range(len(sizes)):
                expected[block_of(target, place, region, theirs)] = source.memory[
                    block_of(source, place, region, ours)
                ]
    before = source.memory.copy()

    source_rows, target_rows = block_map(
        source.layout,
        target.layout,
        source_blocks,
        source_start,
        target_blocks,
        target_start,
        start,
        start + tokens,
    )
    assert source_rows.dtype == target_rows.dtype == np.uint64
    assert source_rows.shape == target_rows.shape == (len(source_rows), 2)
    move(source_rows, target_rows)
    np.testing.assert_array_equal(target.memory, expected)
    np.testing.assert_array_equal(source.memory, before)
    assert mergeable(target, source_rows, target_rows) == []


def plain(block_count: int = 16, tokens: int = 4, sizes: tuple[int, ...] = (10, 10)) -> End:
    return make_end(Shape(((tokens, sizes),)), [block_count], [0], 0)


def rows(source: End, target: End, ours: Blocks, theirs: Blocks, end: int) -> list[list[int]]:
    """Offset in the source, offset in the destination and length of every row."""
    found = block_map(source.layout, target.layout, ours, 0, theirs, 0, 0, end)
    origins = found[0][:, 0] - np.uint64(source.memory.ctypes.data)
    targets = found[1][:, 0] - np.uint64(target.memory.ctypes.data)
    return [list(row) for row in zip(origins, targets, found[0][:, 1], strict=True)]


def test_adjacent_blocks_become_one_row_per_region() -> None:
    source, target = plain(), plain()
    assert rows(source, target, ((3, 4, 5),), ((7, 8, 9),), 12) == [[30, 70, 30], [190, 230, 30]]


def test_blocks_handed_out_backwards_become_one_row_per_region_too() -> None:
    source, target = plain(), plain()
    assert rows(source, target, ((5, 4, 3),), ((9, 8, 7),), 12) == [[30, 70, 30], [190, 230, 30]]


def test_a_break_at_either_end_breaks_the_row() -> None:
    source, target = plain(sizes=(10,)), plain(sizes=(10,))
    assert rows(source, target, ((3, 4, 6),), ((7, 8, 9),), 12) == [[30, 70, 20], [60, 90, 10]]
    assert rows(source, target, ((3, 4, 5),), ((7, 9, 10),), 12) == [[30, 70, 10], [40, 90, 20]]


def test_no_row_crosses_into_another_region() -> None:
    # The last block of one region and the first of the next adjoin at both ends.
    source, target = plain(block_count=1), plain(block_count=1)
    assert rows(source, target, ((0,),), ((0,),), 4) == [[0, 0, 10], [10, 10, 10]]


def test_interleaved_halves_move_block_by_block() -> None:
    def interleaved(memory: Memory) -> CacheLayout:
        base = memory.ctypes.data
        halves = tuple(CacheRegion(base + half, 10, 8, -1, 20) for half in (0, 10))
        return CacheLayout((CacheGroup(4, halves),), "uint8", "HND")

    memory = np.arange(160, dtype=np.uint8)
    target = np.zeros(160, dtype=np.uint8)
    found = block_map(interleaved(memory), interleaved(target), ((0, 1),), 0, ((2, 3),), 0, 0, 8)
    assert len(found[0]) == 4
    move(*found)
    np.testing.assert_array_equal(target[40:80], memory[0:40])
    assert not target[:40].any()
    assert not target[80:].any()


def test_a_partial_last_block_moves_whole() -> None:
    source, target = plain(sizes=(10,)), plain(sizes=(10,))
    assert rows(source, target, ((3, 4),), ((7, 8),), 5) == [[30, 70, 20]]


def test_nothing_to_move_is_no_rows() -> None:
    source, target = plain(), plain()
    found = block_map(source.layout, target.layout, ((),), 0, ((),), 0, 0, 0)
    assert found[0].shape == found[1].shape == (0, 2)


@pytest.mark.parametrize(
    ("theirs", "field", "value"),
    [
        (((1, 16),), "destination_blocks[0]", 16),
        (((-1, 1),), "destination_blocks[0]", -1),
        (((1, 2**70),), "destination_blocks[0]", 2**70),
        (((1, 1),), "destination_blocks[0]", 1),
        (((1,),), "destination_blocks[0]", "1 blocks from token 0 on"),
        ((), "destination_blocks", "0 groups"),
        (((1, 2), (1, 2)), "destination_blocks", "2 groups"),
    ],
)
def test_a_peer_s_wrong_blocks_are_named(theirs: Blocks, field: str, value: object) -> None:
    end = plain()
    with pytest.raises(RemoteProtocolError) as refusal:
        block_map(end.layout, end.layout, ((3, 4),), 0, theirs, 0, 0, 8)
    assert (refusal.value.field, refusal.value.value) == (field, value)


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (((1, 16),), r"source_blocks\[0\] = 16: expected a block id from 0 to 15"),
        (((-1, 1),), r"source_blocks\[0\] = -1: expected a block id from 0 to 15"),
        (((1, 1 << 64),), r"source_blocks\[0\] = 18446744073709551616: expected a block id"),
        (((1,),), r"source_blocks\[0\] = '1 blocks from token 0 on': expected at least 2"),
        (((1, 2), ()), "source_blocks has 2 of 1 groups"),
    ],
)
def test_our_own_wrong_blocks_are_our_error(ours: Blocks, words: str) -> None:
    end = plain()
    with pytest.raises(LocalProtocolError, match=words):
        block_map(end.layout, end.layout, ours, 0, ((3, 4),), 0, 0, 8)


def test_the_smallest_region_bounds_the_block_ids() -> None:
    first, second = (plain(count, sizes=(10,)).layout.groups[0].regions[0] for count in (16, 9))
    layout = CacheLayout((CacheGroup(4, (first, second)),), "uint8", "HND")
    assert layout.groups[0].block_count == 9
    with pytest.raises(RemoteProtocolError, match=r"destination_blocks\[0\] = 9: .* 0 to 8"):
        block_map(layout, layout, ((0,),), 0, ((9,),), 0, 0, 4)


def test_a_start_inside_a_block_is_refused() -> None:
    layout, blocks = plain().layout, ((0, 1, 2, 3),)
    with pytest.raises(LocalProtocolError, match=r"start = 6: expected 4 plus a multiple of"):
        block_map(layout, layout, blocks, 4, blocks, 2, 6, 8)
    with pytest.raises(RemoteProtocolError, match=r"start = 4: expected 2 plus a multiple of"):
        block_map(layout, layout, blocks, 0, blocks, 2, 4, 8)


def test_a_range_before_the_first_block_is_refused() -> None:
    layout, blocks = plain().layout, ((0, 1, 2, 3),)
    with pytest.raises(LocalProtocolError, match="start = 0: expected 4"):
        block_map(layout, layout, blocks, 4, blocks, 0, 0, 4)
    with pytest.raises(RemoteProtocolError, match="start = 0: expected 4"):
        block_map(layout, layout, blocks, 0, blocks, 4, 0, 4)
    for start, end in ((8, 4), (-4, 4)):
        with pytest.raises(LocalProtocolError, match="are no range"):
            block_map(layout, layout, blocks, 0, blocks, 0, start, end)


def test_blocks_that_cover_only_the_end_of_a_prompt_are_refused() -> None:
    # A group with a sliding window has fewer blocks than the prompt has.
    source = make_end(Shape(((4, (10,)), (4, (10,)))), [16, 16], [0], 0)
    full, window = (0, 1, 2, 3), (0, 1)
    with pytest.raises(RemoteProtocolError, match=r"destination_blocks\[1\] = '2 blocks"):
        block_map(source.layout, source.layout, (full, full), 0, (full, window), 0, 0, 16)


def test_unequal_geometry_is_refused_by_name() -> None:
    ours = plain().layout
    with pytest.raises(ConfigurationError, match=r"layout.block_tokens\[0\] = '8': expected 4"):
        block_map(ours, plain(tokens=8).layout, ((0,),), 0, ((0,),), 0, 0, 4)
    with pytest.raises(ConfigurationError, match=r"layout.dtype = 'int8': expected uint8"):
        block_map(ours, attrs.evolve(ours, dtype="int8"), ((0,),), 0, ((0,),), 0, 0, 4)

"""Engines of unequal shapes: every byte asked for is written once, and no other byte."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layout import shapes
from tests.layout.shapes import Rank, Style

from pushkv.block_map import block_map
from pushkv.core.errors import ConfigurationError, LocalProtocolError
from pushkv.core.ids import NO_BLOCK, Blocks
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion, Cells, difference
from pushkv.rank_plan import NO_HEADS, RankPlan, Ranks, heads_held, heads_written
from pushkv.transport import Segments

Expected = dict[int, int]
"""Place of a byte at the consumer → place of the byte at the producer."""


@attrs.frozen(eq=False)
class Pair:
    """Two engines and what is to move between them."""

    producers: list[Rank]
    consumers: list[Rank]
    plan: RankPlan
    start: int
    end: int


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    sizes = draw(st.tuples(st.sampled_from(shapes.PARALLEL), st.sampled_from(shapes.PARALLEL)))
    stages = draw(st.sampled_from(((1, 1), (1, 1), (2, 1), (3, 1), (1, 2), (2, 2))))
    groups = draw(shapes.groups(sizes, max(stages)))
    ours, theirs = draw(shapes.styles(groups)), draw(shapes.styles(groups))
    start = draw(st.integers(0, 9))
    end = start + draw(st.integers(0, 14))
    first = draw(st.integers(0, start))
    source = draw(shapes.blocks(groups, ours, 0, end, windowed=True))
    target = draw(shapes.blocks(groups, theirs, first, end, windowed=True))
    engines = [Ranks(*each) for each in zip(sizes, stages, strict=True)]

    def made(styles: tuple[Style, ...], engine: int, first: int, blocks: Blocks) -> list[Rank]:
        return [
            shapes.make_rank(groups, styles, engines[engine], rank, first, blocks, 9 * engine)
            for rank in range(engines[engine].count)
        ]

    plan = RankPlan(tuple(group.heads for group in groups), *engines)
    return Pair(made(ours, 0, 0, source), made(theirs, 1, first, target), plan, start, end)


def filled(pair: Pair, source: Rank, target: Rank, place: int) -> int:
    """Tokens beyond the last that move with its page, where K is transposed at both ends."""
    ours, theirs = (each.layout.groups[place].cells for each in (source, target))
    assert ours is not None
    assert theirs is not None
    if not (ours.axes == theirs.axes == "HTN" and ours.page_tokens == theirs.page_tokens):
        return 0
    within = [(pair.end - each.first) % ours.page_tokens for each in (source, target)]
    whole = within[0] == within[1] > 0 and pair.end - within[0] >= pair.start
    return ours.page_tokens - within[0] if whole else 0


def writers_of(pair: Pair, consumer: Rank) -> dict[int, Expected]:
    """By producer rank: every byte that `consumer` wants, from any one rank that has it."""
    found: dict[int, Expected] = defaultdict(dict)
    sizes = pair.plan.producer.tensor, pair.plan.consumer.tensor
    for place, group in enumerate(consumer.layout.groups):
        for layer in group.layers:
            for head in consumer.layout.heads_here(group):
                rank = next(
                    index
                    for index, each in enumerate(pair.producers)
                    if layer in each.layout.groups[place].layers
                    and head
                    in heads_written(
                        group.heads_total,
                        sizes[0],
                        each.layout.tensor_parallel_rank,
                        sizes[1],
                        consumer.layout.tensor_parallel_rank,
                    )
                )
                end = pair.end + filled(pair, pair.producers[rank], consumer, place)
                for token in range(pair.start, end):
                    there = consumer.places(place, layer, head, token)
                    here = pair.producers[rank].places(place, layer, head, token)
                    if there is None:
                        continue
                    if here is None:
                        assert token < pair.end - group.window_tokens
                        continue
                    found[rank].update(zip(there.tolist(), here.tolist(), strict=True))
    return found


def mapped(source: Rank, target: Rank, start: int, end: int) -> tuple[Segments, Segments]:
    return block_map(
        source.layout,
        target.layout,
        source.blocks,
        source.first,
        target.blocks,
        target.first,
        start,
        end,
    )


def as_bytes(source: Rank, target: Rank, rows: tuple[Segments, Segments]) -> Expected:
    """The rows byte by byte; no byte is written twice."""
    found: Expected = {}
    for (here, length), (there, other) in zip(rows[0].tolist(), rows[1].tolist(), strict=True):
        assert length == other > 0
        for offset in range(length):
            to = there + offset - target.memory.ctypes.data
            assert to not in found, "written twice"
            found[to] = here + offset - source.memory.ctypes.data
    return found


def runs(expected: Expected, target: Rank) -> int:
    """The fewest rows that move these bytes, none from one region into the next."""
    base = target.memory.ctypes.data
    firsts = {region.address - base for group in target.layout.groups for region in group.regions}
    return sum(
        1
        for there, here in expected.items()
        if there in firsts or expected.get(there - 1) != here - 1
    )


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_every_byte_asked_for_is_written_once_from_the_right_place_in_the_fewest_rows(
    pair: Pair,
) -> None:
    for number, consumer in enumerate(pair.consumers):
        expected = writers_of(pair, consumer)
        served_by = pair.plan.producers_of(number)
        assert set(expected) <= set(served_by)
        written: set[int] = set()
        for rank in served_by:
            source = pair.producers[rank]
            assert number in pair.plan.consumers_of(rank)
            rows = mapped(source, consumer, pair.start, pair.end)
            moved = as_bytes(source, consumer, rows)
            assert moved == expected.get(rank, {})
            assert len(rows[0]) == runs(moved, consumer)
            assert not written & moved.keys(), "two ranks write one byte"
            written |= moved.keys()
        for rank in set(range(len(pair.producers))) - set(served_by):
            rows = mapped(pair.producers[rank], consumer, pair.start, pair.end)
            assert len(rows[0]) == 0, "a rank that owes no verdict writes"


@settings(max_examples=100, deadline=None)
@given(pairs(), st.data())
def test_parts_of_any_length_move_what_one_would(pair: Pair, data: st.DataObject) -> None:
    """Streaming cuts a prompt anywhere."""
    cut = data.draw(st.integers(pair.start, pair.end))
    source, consumer = pair.producers[0], pair.consumers[0]
    whole = as_bytes(source, consumer, mapped(source, consumer, pair.start, pair.end))
    try:
        first = as_bytes(source, consumer, mapped(source, consumer, pair.start, cut))
    except LocalProtocolError:
        # Its window reaches back over what the source kept for the whole prompt's.
        assert any(NO_BLOCK in ids for ids in source.blocks)
        return
    second = as_bytes(source, consumer, mapped(source, consumer, cut, pair.end))
    if any(group.cells and group.cells.axes == "HTN" for group in source.layout.groups):
        assert {**first, **second}.items() >= whole.items()
        return
    assert not first.keys() & second.keys()
    assert first | second == whole


@settings(max_examples=100, deadline=None)
@given(pairs())
def test_a_layout_with_cells_reaches_the_peer_whole(pair: Pair) -> None:
    for rank in (*pair.producers, *pair.consumers):
        assert CacheLayout.decode(rank.layout.encode()) == rank.layout
    ours, theirs = pair.producers[0].layout, pair.consumers[-1].layout
    assert difference(ours.description(), theirs.description()) is None
    assert ours.digest() == theirs.digest()


@given(st.integers(1, 16), st.sampled_from((1, 2, 4, 8, 16)), st.sampled_from((1, 2, 3, 4, 8, 16)))
def test_a_plan_is_one_matter_seen_from_two_ends(heads: int, ours: int, theirs: int) -> None:
    for size in (ours, theirs):
        if heads % size and size % heads:
            with pytest.raises(ConfigurationError, match=f"heads_total = {heads}: expected"):
                heads_held(heads, size, 0)
            return
    plan = RankPlan((heads,), Ranks(ours, 2), Ranks(theirs))
    forward = {(p, d) for d in range(theirs) for p in plan.producers_of(d)}
    assert forward == {(p, d) for p in range(2 * ours) for d in plan.consumers_of(p)}
    assert {p for p, _ in forward} == set(range(2 * ours)), "a rank that hears nothing"
    for rank in range(theirs):
        written = [
            head
            for other in range(ours)
            for head in heads_written(heads, ours, other, theirs, rank)
        ]
        assert sorted(written) == list(heads_held(heads, theirs, rank))


def test_equal_sizes_pair_off_and_replicas_share_the_work() -> None:
    def served(heads: int, producer: int, consumer: int) -> list[tuple[int, ...]]:
        plan = RankPlan((heads,), Ranks(producer), Ranks(consumer))
        return [plan.producers_of(rank) for rank in range(consumer)]

    assert served(8, 4, 4) == served(2, 4, 4) == served(1, 4, 4) == [(0,), (1,), (2,), (3,)]
    assert served(8, 1, 2) == [(0,), (0,)]
    assert served(8, 2, 4) == [(0,), (0,), (1,), (1,)]
    assert served(6, 3, 2) == [(0, 1), (1, 2)]
    assert served(1, 2, 1) == [(0, 1)]  # rank 1 writes nothing, and hears that it is not needed
    assert served(1, 1, 4) == [(0,)] * 4
    assert served(2, 4, 2) == [(0, 1), (2, 3)]


def test_opaque_blocks_go_to_the_same_rank_of_an_equal_engine() -> None:
    plan = RankPlan((8, NO_HEADS), Ranks(2), Ranks(2))
    assert [plan.producers_of(rank) for rank in range(2)] == [(0,), (1,)]
    with pytest.raises(ConfigurationError, match="tensor_parallel_size = 2: expected 1, for"):
        RankPlan((8, NO_HEADS), Ranks(2), Ranks(1)).producers_of(0)


GOOD = CacheGroup(4, (CacheRegion(0, 64, 9),) * 2, Cells("HN", 2, 4))


def only(group: CacheGroup = GOOD, **changes: Any) -> CacheLayout:
    return attrs.evolve(CacheLayout((group,), "uint8", "any"), **changes)


@pytest.mark.parametrize(
    ("theirs", "field", "value", "ours"),
    [
        (only(dtype="int8"), "dtype", "int8", "uint8"),
        (only(attrs.evolve(GOOD, cells=Cells("HN", 4, 4))), "cells[0]", "4 in 0-1", "8 in 0-1"),
        (only(attrs.evolve(GOOD, cells=None)), "block_tokens[0]", "4", "None"),
        (only(groups=(GOOD, GOOD)), "cells[1]", "8 in 0-1", "None"),
        (
            only(attrs.evolve(GOOD, layers=(0, 2), layers_total=2)),
            "cells[0]",
            "8 in 0, 2",
            "8 in 0-1",
        ),
        (
            only(attrs.evolve(GOOD, regions=GOOD.regions * 2, layers=(0, 0, 1, 1))),
            "cells[0]",
            "8+8 in 0-1",
            "8 in 0-1",
        ),
        (
            only(attrs.evolve(GOOD, window_tokens=7)),
            "layers[0]",
            "2, window of 7 tokens",
            "2",
        ),
        (
            only(
                attrs.evolve(
                    GOOD, regions=(CacheRegion(0, 128, 9),) * 2, cells=Cells("HNK", 2, 4, 2)
                )
            ),
            "heads[0]",
            "2 of K and V apart",
            "2",
        ),
        (
            only(
                attrs.evolve(GOOD, regions=(CacheRegion(0, 128, 9),) * 2, cells=Cells("HN", 4, 4))
            ),
            "heads[0]",
            "4",
            "2",
        ),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(
    theirs: CacheLayout, field: str, value: str, ours: str
) -> None:
    assert difference(only().description(), theirs.description()) == field
    with pytest.raises(ConfigurationError) as refusal:
        block_map(only(), theirs, ((0,),), 0, ((0,),), 0, 0, 4)
    assert refusal.value.field == f"layout.{field}"
    assert refusal.value.value == value
    assert refusal.value.expected == f"{ours} as here"


def test_a_stage_whose_layer_has_another_cell_is_refused_by_the_map() -> None:
    stage = attrs.evolve(GOOD, regions=GOOD.regions[:1], layers=(1,), layers_total=2)
    wide = attrs.evolve(stage, regions=(CacheRegion(0, 128, 9),))
    two = {"pipeline_parallel_size": 2}
    assert len(block_map(only(stage, **two), only(), ((0,),), 0, ((0,),), 0, 0, 4)[0]) == 1
    with pytest.raises(ConfigurationError, match=r"groups\[0\] of layer 1 = 8: expected 16"):
        block_map(only(wide, **two), only(), ((0,),), 0, ((0,),), 0, 0, 4)


def test_a_source_without_a_wanted_block_is_our_error() -> None:
    with pytest.raises(LocalProtocolError, match=r"source_blocks\[0\] has no block for a token"):
        block_map(only(), only(), ((NO_BLOCK,),), 0, ((0,),), 0, 0, 4)
    window = only(attrs.evolve(GOOD, window_tokens=4))
    blocks = ((NO_BLOCK, 1),)
    assert len(block_map(window, window, blocks, 0, ((0, 1),), 0, 0, 8)[0]) == 2
    with pytest.raises(LocalProtocolError, match=r"source_blocks\[0\] has no block for a token"):
        block_map(window, window, blocks, 0, ((0, 1),), 0, 0, 7)
    # A part in the middle: what counts is how far the prompt is computed, not where the part ends.
    three, wanted = ((NO_BLOCK, NO_BLOCK, 2),), ((0, 1, 2),)
    assert len(block_map(window, window, three, 0, wanted, 0, 0, 8, 12)[0]) == 0
    with pytest.raises(LocalProtocolError, match=r"source_blocks\[0\] has no block for a token"):
        block_map(window, window, three, 0, wanted, 0, 0, 8, 11)


def test_a_long_prompt_of_many_layers_takes_one_row_per_run() -> None:
    """16,384 tokens of 64 layers, from two ranks' blocks of 16 to one rank's of 64."""
    tokens, layers = 16_384, 64

    def engine(block: int, size: int) -> CacheLayout:
        heads, cell = 8 // size, 256
        memory = block * heads * cell
        regions = tuple(
            CacheRegion(layer << 32, memory, tokens // block) for layer in range(layers)
        )
        return CacheLayout(
            (CacheGroup(block, regions, Cells("HN", 8, block)),), "half", "any", size, 0
        )

    source, target = engine(16, 2), engine(64, 1)
    ours = (tuple(range(tokens // 16)),)
    theirs = (tuple(reversed(range(tokens // 64))),)
    rows, _ = block_map(source, target, ours, 0, theirs, 0, 0, tokens)
    assert len(rows) == layers * (tokens // 16) * 4
    assert int(rows[:, 1].sum()) == layers * tokens * 4 * 256


def test_axes_that_would_make_millions_of_rows_are_refused_before_they_are_made() -> None:
    def engine(axes: str) -> CacheLayout:
        regions = tuple(CacheRegion(layer << 40, 1 << 22, 64) for layer in range(64))
        return CacheLayout((CacheGroup(1 << 16, regions, Cells(axes, 8, 1 << 16)),), "half", "any")

    blocks = ((0, 1),)
    few, _ = block_map(engine("HN"), engine("NH"), blocks, 0, blocks, 0, 0, 1_000)
    assert len(few) == 64 * 8 * 1_000
    with pytest.raises(ConfigurationError, match=r"axes\[0\] = 'NH': expected axes closer to HN"):
        block_map(engine("HN"), engine("NH"), blocks, 0, blocks, 0, 0, 20_000)
    assert len(block_map(engine("NH"), engine("NH"), blocks, 0, blocks, 0, 0, 100_000)[0]) == 64


def test_bytes_really_move() -> None:
    """Two ranks of blocks of 2 tokens to one of blocks of 3, K and V apart, heads first or last."""
    group = shapes.Group(2, 2, (0, 1), (2,), 0)
    styles = (Style("KHN", 2, 1, 0), Style("NHK", 3, 1, 5))
    producers = [
        shapes.make_rank((group,), styles[:1], Ranks(2), rank, 0, ((3, 1, 2, 0),), 1)
        for rank in range(2)
    ]
    target = shapes.make_rank((group,), styles[1:], Ranks(1), 0, 1, ((1, 0),), 7)
    for source in producers:
        for here, there in zip(*mapped(source, target, 2, 7), strict=True):
            ctypes.memmove(int(there[0]), int(here[0]), int(here[1]))
    for layer in (0, 1):
        for head in (0, 1):
            for token in range(2, 7):
                here = producers[head].places(0, layer, head, token)
                there = target.places(0, layer, head, token)
                np.testing.assert_array_equal(producers[head].memory[here], target.memory[there])

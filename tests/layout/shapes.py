"""Engines of any shape in real memory, and where each byte of their KV lies, the slow way."""

from __future__ import annotations

import attrs
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from pushkv.core.ids import NO_BLOCK, Blocks
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion, Cells
from pushkv.rank_plan import Ranks, heads_held

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]
PARALLEL = (1, 2, 3, 4)
ORDERS = {1: ("HN", "NH"), 2: ("KHN", "KNH", "HKN", "NKH", "HNK", "NHK", "HTN", "HTN")}


@attrs.frozen
class Group:
    """What both engines have in common: layer l has a cell of `cells[l % len(cells)]` bytes."""

    heads: int
    planes: int
    layers: tuple[int, ...]
    cells: tuple[int, ...]
    window: int

    def cell(self, layer: int) -> int:
        return self.cells[layer % len(self.cells)]


@attrs.frozen
class Style:
    """How an engine lays a group out."""

    axes: str
    page: int
    pages: int
    padding: int

    @property
    def block(self) -> int:
        return self.page * self.pages


@attrs.frozen(eq=False)
class Rank:
    """One rank: memory, layout, and per group the blocks of the prompt's tokens from `first` on."""

    memory: Bytes
    layout: CacheLayout
    blocks: Blocks
    first: int

    def places(self, group: int, layer: int, head: int, token: int) -> Places | None:
        """Where the bytes of all planes lie in the memory; None where the token has no block."""
        cache = self.layout.groups[group]
        cells = cache.cells
        assert cells is not None
        block = self.blocks[group][(token - self.first) // cache.block_tokens]
        if block == NO_BLOCK:
            return None
        region = cache.regions[cache.layers.index(layer)]
        held = self.layout.heads_here(cache)
        page, within = divmod((token - self.first) % cache.block_tokens, cells.page_tokens)
        pages = cache.block_tokens // cells.page_tokens
        if cells.axes == "HTN":
            halves = np.arange(region.block_bytes).reshape(
                pages, len(held), 2, cells.page_tokens, -1
            )[page]
            vector = halves.shape[-1]
            keys = halves[:, 0].reshape(len(held), vector, cells.page_tokens).swapaxes(1, 2)
            both: Places = np.concatenate((keys, halves[:, 1]), axis=2)[head - held.start, within]
            start = region.address - self.memory.ctypes.data + block * region.block_stride_bytes
            both += start
            return both
        sizes = {"K": cells.planes, "H": len(held), "N": cells.page_tokens}
        whole = np.arange(region.block_bytes).reshape(
            pages, *(sizes[axis] for axis in cells.axes), -1
        )[page]
        if "K" not in cells.axes:
            whole = whole[np.newaxis]
        axes = cells.axes if "K" in cells.axes else "K" + cells.axes
        whole = np.moveaxis(whole, [axes.index(axis) for axis in "KHN"], [0, 1, 2])
        found = whole[:, head - held.start, within]
        start = region.address - self.memory.ctypes.data + block * region.block_stride_bytes
        return start + found.ravel()


def stage_layers(layers: tuple[int, ...], stages: int, stage: int) -> tuple[int, ...]:
    """Layers in runs, as even as can be; every stage has one at least."""
    cut = [round(len(layers) * each / stages) for each in (stage, stage + 1)]
    return layers[cut[0] : cut[1]]


def make_rank(
    groups: tuple[Group, ...],
    styles: tuple[Style, ...],
    ranks: Ranks,
    rank: int,
    first: int,
    blocks: Blocks,
    fill: int,
) -> Rank:
    """A rank with as many blocks as its block ids need."""
    stage, tensor = divmod(rank, ranks.tensor)
    at, placed = 0, []
    for group, style, ids in zip(groups, styles, blocks, strict=True):
        layers = stage_layers(group.layers, ranks.pipeline, stage)
        heads = len(heads_held(group.heads, ranks.tensor, tensor))
        count = max((each for each in ids if each != NO_BLOCK), default=0) + 2
        regions = []
        for layer in layers:
            size = style.block * heads * group.planes * group.cell(layer)
            regions.append((at, size, count, size + style.padding))
            at += count * (size + style.padding) + 1
        placed.append((regions, layers))
    memory = np.random.default_rng(fill + rank).integers(0, 256, at, dtype=np.uint8)
    base = memory.ctypes.data
    cache = tuple(
        CacheGroup(
            style.block,
            tuple(CacheRegion(base + a, size, count, -1, step) for a, size, count, step in regions),
            Cells(style.axes, group.heads, style.page, group.planes, int(style.axes == "HTN")),
            layers,
            len(group.layers),
            group.window,
        )
        for group, style, (regions, layers) in zip(groups, styles, placed, strict=True)
    )
    layout = CacheLayout(cache, "uint8", "any", ranks.tensor, tensor, ranks.pipeline, stage)
    return Rank(memory, layout, blocks, first)


@st.composite
def groups(draw: st.DrawFn, sizes: tuple[int, int], stages: int) -> tuple[Group, ...]:
    """Groups whose heads can be split over both sizes, or are held by several ranks."""
    found = []
    for _ in range(draw(st.integers(1, 2))):
        heads = draw(
            st.sampled_from(
                [
                    heads
                    for heads in (1, 2, 3, 4, 6, 8, 12)
                    if all(heads % size == 0 or size % heads == 0 for size in sizes)
                ]
            )
        )
        count = draw(st.integers(stages, 3))
        layers = sorted(draw(st.sets(st.integers(0, 5), min_size=count, max_size=count)))
        cells = draw(st.lists(st.sampled_from((1, 2, 3)), min_size=1, max_size=2))
        window = draw(st.sampled_from((0, 0, 1, 3, 7)))
        planes = draw(st.integers(1, 2))
        found.append(Group(heads, planes, tuple(layers), tuple(cells), window))
    return tuple(found)


@st.composite
def styles(draw: st.DrawFn, groups: tuple[Group, ...]) -> tuple[Style, ...]:
    return tuple(
        Style(
            draw(st.sampled_from(ORDERS[group.planes])),
            draw(st.sampled_from((1, 2, 3, 4, 6))),
            draw(st.sampled_from((1, 1, 2))),
            draw(st.sampled_from((0, 0, 5))),
        )
        for group in groups
    )


@st.composite
def blocks(
    draw: st.DrawFn,
    groups: tuple[Group, ...],
    styles: tuple[Style, ...],
    first: int,
    end: int,
    windowed: bool,
) -> Blocks:
    """Distinct ids for tokens [first, end), in any order; none out of some of the windows."""
    found = []
    for group, style in zip(groups, styles, strict=True):
        count = -(-(end - first) // style.block)
        order = draw(st.sampled_from(("up", "down", "scattered")))
        base = draw(st.integers(0, 2))
        ids = list(range(base, base + count))
        ids = list(draw(st.permutations(ids))) if order == "scattered" else ids
        ids = ids[::-1] if order == "down" else ids
        if windowed and group.window:
            kept = (max(end - group.window, first) - first) // style.block
            gone = draw(st.integers(0, kept))
            ids[:gone] = [NO_BLOCK] * gone
        found.append(tuple(ids))
    return tuple(found)

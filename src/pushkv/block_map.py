"""Which bytes of a producer's blocks go to which bytes of a consumer's: the block map.

Theory of operation
-------------------
A group with `Cells` is mapped token by token. The tokens are cut where a page begins at either end;
between two cuts, a *stretch*, both ends are plain strided arrays of planes, heads and tokens, and
the axes that are contiguous at both ends fall together. Stretches of one length look alike, and so
do regions of one geometry: so rows are computed once for each kind, with numpy, and merged where
they adjoin at both ends. An opaque group is mapped block by block.

Nothing is written but the tokens asked for and, of opaque blocks and of pages with K transposed at
both ends, the rest of the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from pushkv.cache_groups import TRANSPOSED
from pushkv.core.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from pushkv.core.ids import NO_BLOCK, Blocks
from pushkv.layout import CacheGroup, CacheLayout, difference
from pushkv.rank_plan import heads_written
from pushkv.transport import Segments

__all__ = ["ROWS_MOST", "block_map", "check_pair", "regions_in_order"]

ROWS_MOST = 8 * 1024 * 1024
"""Rows of one group of a block map; axes that are too unlike make one for every number."""

_Ids = NDArray[np.int64]
_Pair = tuple[_Ids, _Ids]


@frozen(eq=False)
class _Rows:
    """Rows of one region's bytes, from its first byte on; each array has shape (n,)."""

    source: _Ids
    destination: _Ids
    length: _Ids


@frozen(eq=False)
class _Stretches:
    """Runs of tokens within one page at both ends; each array has shape (n,).

    Attributes:
        tokens: How many.
        blocks: Block id at the source and at the destination.
        pages: Page within the block at both.
        offsets: First token within the page at both.
    """

    tokens: _Ids
    blocks: _Pair
    pages: _Pair
    offsets: _Pair


def block_map(
    source: CacheLayout,
    destination: CacheLayout,
    source_blocks: Blocks,
    source_start: int,
    destination_blocks: Blocks,
    destination_start: int,
    start: int,
    end: int,
    source_end: int = 0,
) -> tuple[Segments, Segments]:
    """The bytes of prompt tokens [start, end) at both ends, row by row of equal length.

    Only what this source has to write to this destination (`pushkv.rank_plan`): of the heads, those
    that are this rank's to write; of the layers, those that both hold. Rows that adjoin at both
    ends within a region are one; rows are ordered by destination within a region. No row crosses
    from one region into another.

    Args:
        source: Our layout.
        destination: The peer's layout.
        source_blocks: Per group, ids of the blocks that hold the tokens from `source_start` on.
        source_start: First token of the first source block.
        destination_blocks: Per group, ids of the blocks for the tokens from `destination_start` on;
            `NO_BLOCK` where the consumer keeps none, and nothing is written.
        destination_start: First token of the first destination block.
        start: First token to move; in opaque groups the first one of a block at both ends.
        end: One past the last token to move.
        source_end: One past the last token that the source has computed, if that is later: a
            window reaches back from there.

    Returns:
        Source and destination segments, each of shape (n, 2), dtype uint64: address and length in
        bytes.

    Raises:
        ConfigurationError: The layouts cannot be mapped; names the difference.
        LocalProtocolError: Range or source blocks are wrong: not aligned, too few, out of range.
        RemoteProtocolError: The same of the destination blocks, or one of them is named twice.
    """
    check_pair(source, destination)
    if not 0 <= start <= end:
        raise LocalProtocolError(f"tokens [{start}, {end}) are no range")
    expected = f"{len(source.groups)} groups of block ids"
    if len(source_blocks) != len(source.groups):
        raise LocalProtocolError(f"source_blocks has {len(source_blocks)} of {expected}")
    if len(destination_blocks) != len(source.groups):
        raise RemoteProtocolError(
            "destination_blocks", f"{len(destination_blocks)} groups", expected
        )
    pieces: list[tuple[Segments, Segments]] = []
    for place, (ours, theirs) in enumerate(zip(source.groups, destination.groups, strict=True)):
        try:
            source_ids = _ids("source_blocks", source_blocks, place, ours, source_start, start, end)
        except RemoteProtocolError as fault:
            raise LocalProtocolError(str(fault)) from None
        destination_ids = _ids(
            "destination_blocks", destination_blocks, place, theirs, destination_start, start, end
        )
        named = np.sort(destination_ids[destination_ids != NO_BLOCK])
        twice = named[:-1][named[1:] == named[:-1]]
        if len(twice):
            raise RemoteProtocolError(
                f"destination_blocks[{place}]", int(twice[0]), "each block once"
            )
        first = (start - source_start, start - destination_start)
        stretches = _stretches(ours, theirs, (source_ids, destination_ids), first, end - start)
        later = max(source_end - end, 0)
        stretches = _wanted(stretches, place, ours.window_tokens, later)
        _fill_up(stretches, ours, theirs)
        pieces += _group_rows(source, destination, place, stretches)
    if not pieces:
        nothing = np.zeros((0, 2), dtype=np.uint64)
        return nothing, nothing
    return (
        np.concatenate([piece[0] for piece in pieces]),
        np.concatenate([piece[1] for piece in pieces]),
    )


def check_pair(source: CacheLayout, destination: CacheLayout) -> None:
    """Nothing, where every byte that the two have in common can be mapped.

    Raises:
        ConfigurationError: It cannot; names what differs, and both values.
    """
    ours, theirs = source.description(), destination.description()
    name = difference(ours, theirs)
    if name is not None:
        raise ConfigurationError(
            f"layout.{name}", dict(theirs).get(name), f"{dict(ours).get(name)} as here"
        )
    for place, (here, there) in enumerate(zip(source.groups, destination.groups, strict=True)):
        numbers = [cells.element_bytes for cells in (here.cells, there.cells) if cells is not None]
        if len({each for each in numbers if each}) > 1:
            raise ConfigurationError(
                f"layout.element_bytes[{place}]", numbers[1], f"{numbers[0]} as here"
            )
    if source.pipeline_parallel_size == destination.pipeline_parallel_size == 1:
        return
    for place, (here, there) in enumerate(zip(source.groups, destination.groups, strict=True)):
        sizes = _sizes(source, here), _sizes(destination, there)
        for (layer, number), size in sizes[0].items():
            other = sizes[1].get((layer, number), size)
            if other != size:
                raise ConfigurationError(
                    f"layout.groups[{place}] of layer {layer}", other, f"{size} bytes as here"
                )


def _sizes(layout: CacheLayout, group: CacheGroup) -> dict[tuple[int, int], int]:
    """Bytes of a cell, or of an opaque block, of each region."""
    if group.cells is None:
        sizes: Sequence[int] = [region.block_bytes for region in group.regions]
    else:
        sizes = group.cell_bytes(len(layout.heads_here(group)))
    return dict(zip(group.keys, sizes, strict=True))


def _ids(
    side: str, blocks: Blocks, place: int, group: CacheGroup, first: int, start: int, end: int
) -> _Ids:
    """The ids of one group's blocks for tokens [start, end), checked."""
    skipped, offset = divmod(start - first, group.block_tokens)
    if skipped < 0:
        raise RemoteProtocolError("start", start, f"{first}, the first token of a block, or more")
    if offset and group.cells is None:
        raise RemoteProtocolError(
            "start",
            start,
            f"{first} plus a multiple of block_tokens[{place}] = {group.block_tokens}",
        )
    count = group.blocks_of(offset + end - start) if end > start else 0
    wanted = blocks[place][skipped : skipped + count]
    name = f"{side}[{place}]"
    if len(wanted) < count:
        raise RemoteProtocolError(
            name,
            f"{len(blocks[place])} blocks from token {first} on",
            f"at least {skipped + count} for tokens up to {end}",
        )
    most = group.block_count - 1
    expected = f"a block id from 0 to {most}"
    try:
        ids = np.array(wanted, dtype=np.int64)
    except OverflowError:
        raise RemoteProtocolError(name, max(wanted, key=abs), expected) from None
    bad = ids[((ids < 0) | (ids > most)) & (ids != NO_BLOCK)]
    if len(bad):
        raise RemoteProtocolError(name, int(bad[0]), expected)
    return ids


def _stretches(
    ours: CacheGroup, theirs: CacheGroup, ids: _Pair, first: tuple[int, int], count: int
) -> _Stretches:
    """Cut `count` tokens where a page begins; `first` is where they lie from each first block on.

    Opaque blocks are of one size at both ends and moved whole: their stretches are blocks.
    """
    if ours.cells is None or theirs.cells is None:
        blocks = len(ids[0])
        none = np.zeros(blocks, dtype=np.int64)
        whole = np.full(blocks, ours.block_tokens, dtype=np.int64)
        return _Stretches(whole, ids, (none, none), (none, none))
    pages = ours.cells.page_tokens, theirs.cells.page_tokens
    cuts = [np.zeros(min(count, 1), dtype=np.int64)]
    cuts += [np.arange(-at % page, count, page) for at, page in zip(first, pages, strict=True)]
    begins = np.unique(np.concatenate(cuts))
    tokens = np.diff(begins, append=count)

    def end(side: int, group: CacheGroup) -> tuple[_Ids, _Ids, _Ids]:
        at = begins + first[side] % group.block_tokens
        in_block = at % group.block_tokens
        page, offset = np.divmod(in_block, pages[side])
        return ids[side][at // group.block_tokens], page, offset

    (here, our_page, our_offset), (there, their_page, their_offset) = end(0, ours), end(1, theirs)
    return _Stretches(tokens, (here, there), (our_page, their_page), (our_offset, their_offset))


def _fill_up(stretches: _Stretches, ours: CacheGroup, theirs: CacheGroup) -> None:
    """Let the last page move whole where part of it would be a row for every number."""
    if ours.cells is None or theirs.cells is None or not len(stretches.tokens):
        return
    alike = ours.cells.page_tokens == theirs.cells.page_tokens
    begins = stretches.offsets[0][-1] == stretches.offsets[1][-1] == 0
    if ours.cells.axes == theirs.cells.axes == TRANSPOSED and alike and begins:
        stretches.tokens[-1] = ours.cells.page_tokens


def _wanted(stretches: _Stretches, place: int, window_tokens: int, later: int) -> _Stretches:
    """Without what the consumer keeps no block for, nor what no window reaches any more.

    Raises:
        LocalProtocolError: The source has no block for a token that is wanted.
    """
    source, destination = stretches.blocks
    wanted, missing = destination != NO_BLOCK, source == NO_BLOCK
    if wanted.all() and not missing.any():
        return stretches
    after = np.cumsum(stretches.tokens[::-1])[::-1] - stretches.tokens + later
    gone = missing & (window_tokens > 0) & (after >= window_tokens)
    if (wanted & missing & ~gone).any():
        raise LocalProtocolError(
            f"source_blocks[{place}] has no block for a token that the consumer wants"
        )
    chosen = wanted & ~missing

    def of(pair: _Pair) -> _Pair:
        return pair[0][chosen], pair[1][chosen]

    return _Stretches(
        stretches.tokens[chosen], of(stretches.blocks), of(stretches.pages), of(stretches.offsets)
    )


def _group_rows(
    source: CacheLayout, destination: CacheLayout, place: int, stretches: _Stretches
) -> Iterable[tuple[Segments, Segments]]:
    """The rows of one group, of all regions that both ends hold."""
    ours, theirs = source.groups[place], destination.groups[place]
    index = {key: number for number, key in enumerate(theirs.keys)}
    pairs = [(here, index[key]) for here, key in enumerate(ours.keys) if key in index]
    if ours.cells is not None and not _heads(source, destination, ours):
        return
    alike: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for here, there in pairs:
        region, other = ours.regions[here], theirs.regions[there]
        kind = region.block_bytes, region.block_stride_bytes, other.block_stride_bytes
        alike.setdefault(kind, []).append((here, there))
    for (size, *strides), regions in alike.items():
        most = ROWS_MOST // len(pairs)
        rows = _merged(_kind_rows(source, destination, place, stretches, size, strides, most))
        columns = np.array(regions, dtype=np.int64)
        lengths = np.tile(rows.length.astype(np.uint64), len(regions))

        def segments(addresses: NDArray[np.uint64], offsets: _Ids, lengths: Segments) -> Segments:
            spread = addresses[:, np.newaxis] + offsets.astype(np.uint64)[np.newaxis]
            return np.column_stack((spread.ravel(), lengths))

        yield (
            segments(ours.columns.address[columns[:, 0]], rows.source, lengths),
            segments(theirs.columns.address[columns[:, 1]], rows.destination, lengths),
        )


def regions_in_order(source: CacheLayout, destination: CacheLayout) -> tuple[int, ...]:
    """Addresses of our regions whose rows a block map has one after the other, equally many each.

    None where that is not so: there are several groups, or regions of several geometries.
    """
    if len(source.groups) > 1:
        return ()
    (ours,), (theirs,) = source.groups, destination.groups
    index = {key: number for number, key in enumerate(theirs.keys)}
    pairs = [
        (region, theirs.regions[index[key]])
        for key, region in zip(ours.keys, ours.regions, strict=True)
        if key in index
    ]
    kinds = {
        (region.block_bytes, region.block_stride_bytes, other.block_stride_bytes)
        for region, other in pairs
    }
    return tuple(region.address for region, _ in pairs) if len(kinds) == 1 else ()


def _heads(source: CacheLayout, destination: CacheLayout, group: CacheGroup) -> range:
    return heads_written(
        group.heads_total,
        source.tensor_parallel_size,
        source.tensor_parallel_rank,
        destination.tensor_parallel_size,
        destination.tensor_parallel_rank,
    )


def _kind_rows(
    source: CacheLayout,
    destination: CacheLayout,
    place: int,
    stretches: _Stretches,
    block_bytes: int,
    strides: Sequence[int],
    most: int,
) -> _Rows:
    """The rows of a region of this geometry, in no order; `most` of them are too many."""
    ours, theirs = source.groups[place], destination.groups[place]
    firsts = [stretches.blocks[side] * strides[side] for side in (0, 1)]
    if ours.cells is None or theirs.cells is None:
        return _Rows(firsts[0], firsts[1], np.full(len(firsts[0]), block_bytes, dtype=np.int64))
    heads = _heads(source, destination, ours)
    held = source.heads_here(ours), destination.heads_here(theirs)
    cell = block_bytes // (ours.block_tokens * len(held[0]) * ours.cells.planes)
    element = max(ours.cells.element_bytes, theirs.cells.element_bytes) or cell
    planes = []
    for side, cells in enumerate((ours.cells, theirs.cells)):
        page_bytes = cell * cells.page_tokens * len(held[side]) * cells.planes
        firsts[side] = firsts[side] + stretches.pages[side] * page_bytes
        planes.append(
            [
                step if cells.element_bytes else step | {"C": element}
                for step in cells.steps(len(held[side]), cell)
            ]
        )
    parts = []
    for steps in zip(*planes, strict=True):
        begins = [
            firsts[side]
            + step["first"]
            + stretches.offsets[side] * step["N"]
            + (heads.start - held[side].start) * step["H"]
            for side, step in enumerate(steps)
        ]
        for tokens in np.unique(stretches.tokens):
            chosen = stretches.tokens == tokens
            sizes = {"C": cell // element, "H": len(heads), "N": int(tokens)}
            apart, length = _axes_apart(sizes, steps, element)
            most -= int(np.count_nonzero(chosen)) * prod(sizes[axis] for axis in apart)
            if most < 0:
                raise ConfigurationError(
                    f"layout.axes[{place}]",
                    theirs.cells.axes,
                    f"axes closer to {ours.cells.axes}: this would be over {ROWS_MOST} rows",
                )
            offsets = _pattern(sizes, steps, apart)
            here, there = (
                np.add.outer(begins[side][chosen], offsets[side]).ravel() for side in (0, 1)
            )
            parts.append(_Rows(here, there, np.full(len(here), length, dtype=np.int64)))
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return _Rows(none, none, none)
    return _Rows(
        np.concatenate([part.source for part in parts]),
        np.concatenate([part.destination for part in parts]),
        np.concatenate([part.length for part in parts]),
    )


def _axes_apart(
    sizes: dict[str, int], steps: Sequence[dict[str, int]], element_bytes: int
) -> tuple[list[str], int]:
    """The axes along which each step is a row of its own, and the bytes of a row.

    Axes fall together, from the innermost on, as long as they are contiguous at both ends.
    """
    ours, theirs = steps
    length = element_bytes
    apart = []
    for axis in sorted((axis for axis in sizes if sizes[axis] > 1), key=lambda axis: theirs[axis]):
        if ours[axis] == theirs[axis] == length:
            length *= sizes[axis]
        else:
            apart.append(axis)
    return apart, length


def _pattern(sizes: dict[str, int], steps: Sequence[dict[str, int]], apart: Sequence[str]) -> _Pair:
    """Where the rows of one stretch begin at both ends."""
    offsets = [np.zeros(1, dtype=np.int64)] * 2
    for axis in reversed(apart):
        count = np.arange(sizes[axis], dtype=np.int64)
        offsets = [
            np.add.outer(before, count * step[axis]).ravel()
            for before, step in zip(offsets, steps, strict=True)
        ]
    return offsets[0], offsets[1]


def _merged(rows: _Rows) -> _Rows:
    """Rows by destination; those that adjoin at both ends are one."""
    order = np.argsort(rows.destination, kind="stable")
    source, destination, length = rows.source[order], rows.destination[order], rows.length[order]
    adjoin = (source[:-1] + length[:-1] == source[1:]) & (
        destination[:-1] + length[:-1] == destination[1:]
    )
    firsts = np.concatenate((np.arange(min(len(order), 1)), np.flatnonzero(~adjoin) + 1))
    total = np.add.reduceat(length, firsts) if len(firsts) else length
    return _Rows(source[firsts], destination[firsts], total)

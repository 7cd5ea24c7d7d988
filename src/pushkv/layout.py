"""KV cache geometry of one rank: which bytes of which block go where.

A cache is made of KV cache groups (layers that share block ids); a group has regions, each a run of
equally long blocks in memory: the whole KV of one layer, or its K or V half where these lie apart.
Region r of a group at one end belongs to region r of the same group at the other end.

Both ends must have equal geometry; HELLO compares `CacheLayout.description` and refuses by name.
Addresses, block counts, strides and devices may differ. They are the consumer's to say, and reach
the producer in HELLO, ahead of what the transport needs (`join_memory`).
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import groupby

import msgspec
import numpy as np
from attrs import Factory, field, fields, frozen
from numpy.typing import NDArray

from pushkv._strict import Record, binary, integer, many, record, text
from pushkv.core.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from pushkv.core.ids import Blocks
from pushkv.transport import Region, Segments
from pushkv.wire import (
    BLOCK_ID_MOST,
    GROUPS_MOST,
    MEMORY_BYTES_MOST,
    RANKS_MOST,
    TOKENS_MOST,
)

__all__ = [
    "REGIONS_MOST",
    "CacheGroup",
    "CacheLayout",
    "CacheRegion",
    "block_map",
    "join_memory",
    "split_memory",
]

REGIONS_MOST = 4_096
"""Regions of one layout, all groups together."""
WORD_LENGTH_MOST = 64
"""Characters of the name of a dtype or a KV layout."""
ADDRESS_MOST = 2**63 - 1
SIZES_LENGTH_MOST = 512
"""Characters of a list of block sizes in a description; a longer one is cut and hashed."""

_Ids = NDArray[np.int64]


def _bounded(name: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ConfigurationError(name, value, f"an integer from {least} to {most}")


@frozen
class CacheRegion:
    """Blocks of one tensor, or of one half of it: block i begins at address + i * stride.

    Attributes:
        address: First byte of block 0.
        block_bytes: Length of one block in bytes.
        block_count: Number of blocks.
        device: -1 for host memory, else the accelerator's index.
        block_stride_bytes: From one block's first byte to the next one's; `block_bytes` by default.

    Raises:
        ConfigurationError: A number is out of its bounds, or blocks overlap.
    """

    address: int
    block_bytes: int
    block_count: int
    device: int = -1
    block_stride_bytes: int = Factory(lambda self: self.block_bytes, takes_self=True)

    def __attrs_post_init__(self) -> None:
        _bounded("address", self.address, 0, ADDRESS_MOST)
        _bounded("block_bytes", self.block_bytes, 1, ADDRESS_MOST)
        _bounded("block_count", self.block_count, 1, BLOCK_ID_MOST + 1)
        _bounded("device", self.device, -1, RANKS_MOST)
        _bounded("block_stride_bytes", self.block_stride_bytes, self.block_bytes, ADDRESS_MOST)
        if self.address + self.length_bytes > ADDRESS_MOST:
            raise ConfigurationError("block_count", self.block_count, "blocks inside the memory")

    @property
    def length_bytes(self) -> int:
        """From the first byte of the first block to the last byte of the last one."""
        return (self.block_count - 1) * self.block_stride_bytes + self.block_bytes


@frozen
class _Columns:
    """The regions of a group as arrays of shape (regions,)."""

    address: NDArray[np.uint64]
    stride: NDArray[np.uint64]
    length: NDArray[np.uint64]
    dense: NDArray[np.bool_]


def _columns(group: CacheGroup) -> _Columns:
    regions = group.regions
    stride = np.array([each.block_stride_bytes for each in regions], dtype=np.uint64)
    length = np.array([each.block_bytes for each in regions], dtype=np.uint64)
    address = np.array([each.address for each in regions], dtype=np.uint64)
    return _Columns(address, stride, length, stride == length)


@frozen
class CacheGroup:
    """Layers that share block ids.

    Attributes:
        block_tokens: Tokens per block.
        regions: One per layer, or one per K or V half, in the order of the layers.

    Raises:
        ConfigurationError: `block_tokens` is out of bounds, or there is no region.
    """

    block_tokens: int
    regions: tuple[CacheRegion, ...]
    block_count: int = field(init=False, eq=False, repr=False)
    """Block ids below this exist in every region."""
    _columns: _Columns = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        _bounded("block_tokens", self.block_tokens, 1, TOKENS_MOST)
        if not self.regions:
            raise ConfigurationError("regions", self.regions, "at least one region")
        count = min(each.block_count for each in self.regions)
        object.__setattr__(self, "block_count", count)
        object.__setattr__(self, "_columns", _columns(self))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all regions."""
        return sum(each.block_bytes for each in self.regions)

    def blocks_of(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens from a block's start on; the last may be partial."""
        return -(-tokens // self.block_tokens)


_NUMBER = integer(0, ADDRESS_MOST)
_REGION = record(
    (
        ("address", _NUMBER),
        ("block_bytes", _NUMBER),
        ("block_count", _NUMBER),
        ("device", integer(-1, RANKS_MOST)),
        ("block_stride_bytes", _NUMBER),
    )
)
_GROUP = record((("block_tokens", _NUMBER), ("regions", many(_REGION, REGIONS_MOST))))
_LAYOUT = Record(
    "layout",
    record(
        (
            ("groups", many(_GROUP, GROUPS_MOST)),
            ("dtype", text(WORD_LENGTH_MOST)),
            ("kv_layout", text(WORD_LENGTH_MOST)),
            ("tensor_parallel_size", _NUMBER),
            ("tensor_parallel_rank", _NUMBER),
            ("pipeline_parallel_size", _NUMBER),
            ("pipeline_parallel_rank", _NUMBER),
        )
    ),
)
_MEMORY = Record(
    "memory",
    record((("layout", binary(MEMORY_BYTES_MOST)), ("transport", binary(MEMORY_BYTES_MOST)))),
)
_REGION_FIELDS = tuple(each.name for each in fields(CacheRegion))


@frozen
class CacheLayout:
    """The KV cache of one rank.

    Attributes:
        groups: KV cache groups, in the order of the block ids' tuples.
        dtype: Name of the elements' type, such as ``float16``.
        kv_layout: Name of the order of a block's axes, such as ``HND``.
        tensor_parallel_size: Ranks that share each layer's heads; the rank says which are here.
        pipeline_parallel_size: Stages that share the layers; the rank says which are here.

    Raises:
        ConfigurationError: A field is out of its bounds; names it.
    """

    groups: tuple[CacheGroup, ...]
    dtype: str
    kv_layout: str
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    pipeline_parallel_rank: int = 0
    _description: tuple[tuple[str, str], ...] = field(init=False, eq=False, repr=False)
    _digest: bytes = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        _bounded("groups", len(self.groups), 1, GROUPS_MOST)
        _bounded("regions", sum(len(group.regions) for group in self.groups), 1, REGIONS_MOST)
        for name in ("dtype", "kv_layout"):
            if not 1 <= len(getattr(self, name)) <= WORD_LENGTH_MOST:
                raise ConfigurationError(
                    name, getattr(self, name), f"1 to {WORD_LENGTH_MOST} characters"
                )
        for kind in ("tensor", "pipeline"):
            size = getattr(self, f"{kind}_parallel_size")
            _bounded(f"{kind}_parallel_size", size, 1, RANKS_MOST)
            rank = getattr(self, f"{kind}_parallel_rank")
            _bounded(f"{kind}_parallel_rank", rank, 0, size - 1)
        pairs = _described(self)
        object.__setattr__(self, "_description", pairs)
        object.__setattr__(self, "_digest", blake2b(_plain(pairs), digest_size=16).digest())

    def description(self) -> tuple[tuple[str, str], ...]:
        """Everything that must agree between two ends, as sorted pairs of key and value."""
        return self._description

    def digest(self) -> bytes:
        """16 bytes that are equal exactly where the descriptions are."""
        return self._digest

    def regions_to_register(self) -> list[Region]:
        """The memory of all regions, each byte once.

        Overlapping regions (K and V interleaved, groups that share a tensor) become one; such that
        merely touch stay two, for they may be two allocations, which no single registration spans.
        """
        spans = sorted(
            (region.device, region.address, region.address + region.length_bytes)
            for group in self.groups
            for region in group.regions
        )
        merged: list[tuple[int, int, int]] = []
        for device, start, end in spans:
            if merged and merged[-1][0] == device and start < merged[-1][2]:
                _, first, last = merged.pop()
                merged.append((device, first, max(last, end)))
            else:
                merged.append((device, start, end))
        return [Region(start, end - start, device) for device, start, end in merged]

    def range_bytes(self, start: int, end: int) -> int:
        """Bytes of the whole blocks of prompt tokens [start, end); `start` is a block's first."""
        return sum(group.blocks_of(end - start) * group.block_bytes for group in self.groups)

    def encode(self) -> bytes:
        """This layout, addresses included, for `decode` at a peer."""
        groups = [
            (
                group.block_tokens,
                [
                    tuple(getattr(region, name) for name in _REGION_FIELDS)
                    for region in group.regions
                ],
            )
            for group in self.groups
        ]
        return _plain(
            (
                groups,
                self.dtype,
                self.kv_layout,
                self.tensor_parallel_size,
                self.tensor_parallel_rank,
                self.pipeline_parallel_size,
                self.pipeline_parallel_rank,
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> CacheLayout:
        """The layout that a peer encoded.

        Raises:
            RemoteProtocolError: `data` is not exactly one valid layout; names field and value.
        """
        groups, *rest = _LAYOUT.decode(data)
        where = "layout"
        try:
            decoded = []
            for place, (tokens, regions) in enumerate(groups):
                found = []
                for index, region in enumerate(regions):
                    where = f"layout.groups[{place}].regions[{index}]"
                    found.append(CacheRegion(*region))
                where = f"layout.groups[{place}]"
                decoded.append(CacheGroup(tokens, tuple(found)))
            where = "layout"
            return cls(tuple(decoded), *rest)
        except ConfigurationError as refusal:
            raise RemoteProtocolError(
                f"{where}.{refusal.field}", refusal.value, refusal.expected
            ) from None


_plain = msgspec.msgpack.Encoder().encode


def _described(layout: CacheLayout) -> tuple[tuple[str, str], ...]:
    pairs = {"groups": str(len(layout.groups))}
    for name in ("dtype", "kv_layout"):
        pairs[name] = getattr(layout, name)
    for kind in ("tensor", "pipeline"):
        for part in ("size", "rank"):
            name = f"{kind}_parallel_{part}"
            pairs[name] = str(getattr(layout, name))
    for place, group in enumerate(layout.groups):
        pairs[f"block_tokens[{place}]"] = str(group.block_tokens)
        pairs[f"regions[{place}]"] = str(len(group.regions))
        pairs[f"region_block_bytes[{place}]"] = _sizes(group)
    return tuple(sorted(pairs.items()))


def _sizes(group: CacheGroup) -> str:
    """The block sizes of the regions in order, such as ``28 x 65536, 2 x 4096``."""
    runs = groupby(region.block_bytes for region in group.regions)
    sizes = ", ".join(f"{len(list(run))} x {size}" for size, run in runs)
    if len(sizes) <= SIZES_LENGTH_MOST:
        return sizes
    return f"{sizes[:SIZES_LENGTH_MOST]}... {blake2b(sizes.encode(), digest_size=16).hexdigest()}"


def join_memory(layout: CacheLayout, transport: bytes) -> bytes:
    """What HELLO carries as memory: our layout, and what the peer's transport needs.

    Raises:
        ConfigurationError: Both together are longer than a HELLO may carry.
    """
    joined = _plain((layout.encode(), transport))
    if len(joined) > MEMORY_BYTES_MOST:
        raise ConfigurationError("memory", f"{len(joined)} bytes", f"at most {MEMORY_BYTES_MOST}")
    return joined


def split_memory(memory: bytes) -> tuple[CacheLayout, bytes]:
    """The layout and the transport's part of a peer's memory.

    Raises:
        RemoteProtocolError: `memory` is not what `join_memory` makes; names field and value.
    """
    layout, transport = _MEMORY.decode(memory)
    return CacheLayout.decode(layout), transport


def block_map(
    source: CacheLayout,
    destination: CacheLayout,
    source_blocks: Blocks,
    source_start: int,
    destination_blocks: Blocks,
    destination_start: int,
    start: int,
    end: int,
) -> tuple[Segments, Segments]:
    """The bytes of prompt tokens [start, end) at both ends, row by row of equal length.

    Whole blocks move, so `end` is widened to the end of its block. Blocks that adjoin at both ends
    within a region become one row, in whatever order the tokens use them; rows are ordered by
    destination within a region. No row crosses from one region into another.

    Args:
        source: Our layout.
        destination: The peer's layout, of equal geometry.
        source_blocks: Per group, ids of the blocks that hold the tokens from `source_start` on.
        source_start: First token of the first source block.
        destination_blocks: Per group, ids of the blocks for the tokens from `destination_start` on.
        destination_start: First token of the first destination block.
        start: First token to move, the first one of a block at both ends in every group.
        end: One past the last token to move.

    Returns:
        Source and destination segments, each of shape (n, 2), dtype uint64: address and length in
        bytes.

    Raises:
        ConfigurationError: The layouts differ; names the difference.
        LocalProtocolError: Range or source blocks are wrong: not aligned, too few, out of range.
        RemoteProtocolError: The same of the destination blocks, or one of them is named twice.
    """
    _check_geometry(source, destination)
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
        order = np.argsort(destination_ids, kind="stable")
        source_ids, destination_ids = source_ids[order], destination_ids[order]
        twice = destination_ids[:-1][destination_ids[1:] == destination_ids[:-1]]
        if len(twice):
            raise RemoteProtocolError(
                f"destination_blocks[{place}]", int(twice[0]), "each block once"
            )
        pieces += _group_map(ours, theirs, source_ids, destination_ids)
    return (
        np.concatenate([piece[0] for piece in pieces]),
        np.concatenate([piece[1] for piece in pieces]),
    )


def _check_geometry(source: CacheLayout, destination: CacheLayout) -> None:
    if source.digest() == destination.digest():
        return
    ours, theirs = dict(source.description()), dict(destination.description())
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ConfigurationError(
                f"layout.{name}", theirs.get(name), f"{ours.get(name)} as here"
            )


def _ids(
    side: str, blocks: Blocks, place: int, group: CacheGroup, first: int, start: int, end: int
) -> _Ids:
    """The ids of one group's blocks for tokens [start, end), checked."""
    skipped, offset = divmod(start - first, group.block_tokens)
    if offset or skipped < 0:
        raise RemoteProtocolError(
            "start",
            start,
            f"{first} plus a multiple of block_tokens[{place}] = {group.block_tokens}",
        )
    count = group.blocks_of(end - start)
    wanted = blocks[place][skipped : skipped + count]
    name = f"{side}[{place}]"
    if len(wanted) < count:
        raise RemoteProtocolError(
            name,
            f"{len(blocks[place])} blocks from token {first} on",
            f"at least {skipped + count} for tokens up to {end}",
        )
    most = group.block_count - 1
    if count and not (min(wanted) >= 0 and max(wanted) <= most):
        bad = next(each for each in wanted if not 0 <= each <= most)
        raise RemoteProtocolError(name, bad, f"a block id from 0 to {most}")
    return np.array(wanted, dtype=np.int64)


def _group_map(
    source: CacheGroup, destination: CacheGroup, source_ids: _Ids, destination_ids: _Ids
) -> list[tuple[Segments, Segments]]:
    """The rows of one group; ids are in the order of the destination."""
    ours, theirs = source._columns, destination._columns
    dense = ours.dense & theirs.dense
    count = len(source_ids)
    breaks = (np.diff(source_ids) != 1) | (np.diff(destination_ids) != 1)
    heads = np.concatenate(([0], np.flatnonzero(breaks) + 1)) if count else np.arange(0)
    # Only regions without gaps between their blocks at both ends have anything to coalesce.
    return [
        _rows(ours, theirs, chosen, source_ids, destination_ids, firsts)
        for chosen, firsts in ((dense, heads), (~dense, np.arange(count)))
        if chosen.any()
    ]


def _rows(
    ours: _Columns,
    theirs: _Columns,
    chosen: NDArray[np.bool_],
    source_ids: _Ids,
    destination_ids: _Ids,
    firsts: NDArray[np.int64],
) -> tuple[Segments, Segments]:
    """One row for each chosen region and run of blocks; `firsts` is where the runs begin."""
    blocks = np.diff(firsts, append=len(source_ids)).astype(np.uint64)
    lengths = np.multiply.outer(ours.length[chosen], blocks).ravel()

    def segments(columns: _Columns, ids: _Ids) -> Segments:
        offsets = np.multiply.outer(columns.stride[chosen], ids[firsts].astype(np.uint64))
        addresses = columns.address[chosen][:, np.newaxis] + offsets
        return np.column_stack((addresses.ravel(), lengths))

    return segments(ours, source_ids), segments(theirs, destination_ids)

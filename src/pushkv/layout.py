"""KV cache geometry of one rank: which bytes of which block hold what.

A cache is made of KV cache groups (layers that share block ids); a group has regions, each a run of
equally long blocks in memory: the whole KV of one layer, or its K or V half where these lie apart.
A group whose `Cells` are given says where each token of each head lies in a block; then two ends
may differ in block size, in the order of axes, in tensor-parallel size and in the layers they hold
(`pushkv.block_map`). A group without is opaque: its blocks are moved whole, between equals.

What two ends must agree in is `CacheLayout.description`; HELLO compares it and refuses by name.
Addresses, block counts, strides and devices are the consumer's to say, and reach the producer in
HELLO, ahead of what the transport needs (`join_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby

import msgspec
from attrs import field, fields, frozen

from pushkv._strict import Record, binary, integer, many, record, text
from pushkv.cache_groups import ADDRESS_MOST, CacheGroup, CacheRegion, Cells, bounded
from pushkv.core.errors import ConfigurationError, RemoteProtocolError
from pushkv.rank_plan import RankPlan, Ranks, heads_held
from pushkv.transport import Region
from pushkv.wire import (
    GROUPS_MOST,
    MEMORY_BYTES_MOST,
    RANKS_MOST,
)

__all__ = [
    "REGIONS_MOST",
    "CacheGroup",
    "CacheLayout",
    "CacheRegion",
    "Cells",
    "difference",
    "join_memory",
    "split_memory",
]

REGIONS_MOST = 4_096
"""Regions of one layout, all groups together."""
WORD_LENGTH_MOST = 64
"""Characters of the name of a dtype or a KV layout."""
SIZES_LENGTH_MOST = 512
"""Characters of a list of sizes in a description; a longer one is cut and hashed."""

Pairs = tuple[tuple[str, str], ...]
PIPELINE = "pipeline_parallel_size"
LOCAL_KEYS = (PIPELINE, "cells[", "region_block_bytes[", "regions[")
"""How keys of a description begin that only ends with all layers must agree in."""


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
_CELLS = record(
    (
        ("axes", text(3)),
        ("heads_total", _NUMBER),
        ("page_tokens", _NUMBER),
        ("planes", _NUMBER),
        ("element_bytes", _NUMBER),
    )
)
_GROUP = record(
    (
        ("block_tokens", _NUMBER),
        ("regions", many(_REGION, REGIONS_MOST)),
        ("cells", many(_CELLS, 1)),
        ("layers", many(_NUMBER, REGIONS_MOST)),
        ("layers_total", _NUMBER),
        ("window_tokens", _NUMBER),
    )
)
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
_CELLS_FIELDS = tuple(each.name for each in fields(Cells))


@frozen
class CacheLayout:
    """The KV cache of one rank.

    Attributes:
        groups: KV cache groups, in the order of the block ids' tuples.
        dtype: Name of the elements' type, such as ``float16``.
        kv_layout: Name of the order of an opaque block's axes, such as ``HND``.
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
    _description: Pairs = field(init=False, eq=False, repr=False)
    _digest: bytes = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        bounded("groups", len(self.groups), 1, GROUPS_MOST)
        bounded("regions", sum(len(group.regions) for group in self.groups), 1, REGIONS_MOST)
        for name in ("dtype", "kv_layout"):
            if not 1 <= len(getattr(self, name)) <= WORD_LENGTH_MOST:
                raise ConfigurationError(
                    name, getattr(self, name), f"1 to {WORD_LENGTH_MOST} characters"
                )
        for kind in ("tensor", "pipeline"):
            size = getattr(self, f"{kind}_parallel_size")
            bounded(f"{kind}_parallel_size", size, 1, RANKS_MOST)
            rank = getattr(self, f"{kind}_parallel_rank")
            bounded(f"{kind}_parallel_rank", rank, 0, size - 1)
        pairs = _described(self)
        object.__setattr__(self, "_description", pairs)
        common = [pair for pair in pairs if not pair[0].startswith(LOCAL_KEYS)]
        object.__setattr__(self, "_digest", blake2b(_plain(common), digest_size=16).digest())

    def description(self) -> Pairs:
        """Everything that must agree between two ends, as sorted pairs of key and value.

        But for `LOCAL_KEYS`, where one of them holds some of the layers only.
        """
        return self._description

    def digest(self) -> bytes:
        """16 bytes that are equal where the descriptions are, apart from `LOCAL_KEYS`."""
        return self._digest

    @property
    def ranks(self) -> Ranks:
        """The engine's ranks."""
        return Ranks(self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self.pipeline_parallel_rank * self.tensor_parallel_size + self.tensor_parallel_rank

    @property
    def heads(self) -> tuple[int, ...]:
        """KV heads of the whole model in each group, or `NO_HEADS`."""
        return tuple(group.heads_total for group in self.groups)

    def heads_here(self, group: CacheGroup) -> range:
        """The KV heads of `group` that this rank holds."""
        return heads_held(group.heads_total, self.tensor_parallel_size, self.tensor_parallel_rank)

    def plan_to(self, consumer: CacheLayout) -> RankPlan:
        """Who serves whom, from our engine to the consumer's."""
        return RankPlan(self.heads, self.ranks, consumer.ranks)

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

    def encode(self) -> bytes:
        """This layout, addresses included, for `decode` at a peer."""
        groups = [
            (
                group.block_tokens,
                [
                    tuple(getattr(region, name) for name in _REGION_FIELDS)
                    for region in group.regions
                ],
                [
                    tuple(getattr(cells, name) for name in _CELLS_FIELDS)
                    for cells in (group.cells,)
                    if cells is not None
                ],
                group.layers,
                group.layers_total,
                group.window_tokens,
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
            for place, (tokens, regions, cells, *more) in enumerate(groups):
                found = []
                for index, region in enumerate(regions):
                    where = f"layout.groups[{place}].regions[{index}]"
                    found.append(CacheRegion(*region))
                where = f"layout.groups[{place}]"
                held = Cells(*cells[0]) if cells else None
                decoded.append(CacheGroup(tokens, tuple(found), held, tuple(more[0]), *more[1:]))
            where = "layout"
            return cls(tuple(decoded), *rest)
        except ConfigurationError as refusal:
            raise RemoteProtocolError(
                f"{where}.{refusal.field}", refusal.value, refusal.expected
            ) from None


_plain = msgspec.msgpack.Encoder().encode


def _described(layout: CacheLayout) -> Pairs:
    pairs = {
        "groups": str(len(layout.groups)),
        "dtype": layout.dtype,
        PIPELINE: str(layout.pipeline_parallel_size),
    }
    for place, group in enumerate(layout.groups):
        if group.cells is not None:
            apart = " of K and V apart" if group.cells.planes > 1 else ""
            window = f", window of {group.window_tokens} tokens" if group.window_tokens else ""
            sizes = group.cell_bytes(len(layout.heads_here(group)))
            pairs[f"heads[{place}]"] = f"{group.cells.heads_total}{apart}"
            pairs[f"layers[{place}]"] = f"{group.layers_total}{window}"
            pairs[f"cells[{place}]"] = _cut(_by_size(group.layers, sizes))
        else:
            pairs["kv_layout"] = layout.kv_layout
            pairs["tensor_parallel_size"] = str(layout.tensor_parallel_size)
            pairs["tensor_parallel_rank"] = str(layout.tensor_parallel_rank)
            pairs[f"block_tokens[{place}]"] = str(group.block_tokens)
            pairs[f"regions[{place}]"] = str(len(group.regions))
            pairs[f"region_block_bytes[{place}]"] = _cut(_runs(group))
    return tuple(sorted(pairs.items()))


def _by_size(layers: Sequence[int], sizes: Sequence[int]) -> str:
    """The cells of each layer, such as ``128+64 in 0-27, 29; 256 in 28``."""
    of_layer: dict[int, list[str]] = {}
    for layer, size in zip(layers, sizes, strict=True):
        of_layer.setdefault(layer, []).append(str(size))
    alike: dict[str, list[int]] = {}
    for layer, found in of_layer.items():
        alike.setdefault("+".join(found), []).append(layer)
    return "; ".join(f"{size} in {_spans(found)}" for size, found in alike.items())


def _spans(numbers: Sequence[int]) -> str:
    """Ascending numbers, such as ``0-27, 29``."""
    spans = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        (_, first), *rest = run
        spans.append(f"{first}-{rest[-1][1]}" if rest else str(first))
    return ", ".join(spans)


def _runs(group: CacheGroup) -> str:
    """The block sizes of the regions in order, such as ``28 x 65536, 2 x 4096``."""
    runs = groupby(region.block_bytes for region in group.regions)
    return ", ".join(f"{len(list(run))} x {size}" for size, run in runs)


def _cut(sizes: str) -> str:
    if len(sizes) <= SIZES_LENGTH_MOST:
        return sizes
    return f"{sizes[:SIZES_LENGTH_MOST]}... {blake2b(sizes.encode(), digest_size=16).hexdigest()}"


def difference(ours: Pairs, theirs: Pairs) -> str | None:
    """The first key in which two descriptions disagree, or None where they fit together.

    Where one of the two ends is a pipeline stage, what only ends with all layers have in common is
    left out (`LOCAL_KEYS`).
    """
    here, there = dict(ours), dict(theirs)
    stages = {here.get(PIPELINE, "1"), there.get(PIPELINE, "1")}
    for key in sorted(here.keys() | there.keys()):
        if stages != {"1"} and key.startswith(LOCAL_KEYS):
            continue
        if here.get(key) != there.get(key):
            return key
    return None


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

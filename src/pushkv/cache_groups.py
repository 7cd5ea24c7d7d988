"""Groups of a KV cache: the regions that its blocks lie in, and what a block holds.

A region is a run of equally long blocks in memory: the whole KV of one layer, or its K or V half
where these lie apart. A group's `Cells` say where each token of each head lies in a block.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from attrs import Factory, field, frozen
from numpy.typing import NDArray

from pushkv.core.errors import ConfigurationError
from pushkv.rank_plan import NO_HEADS
from pushkv.wire import BLOCK_ID_MOST, RANKS_MOST, TOKENS_MOST

__all__ = ["ADDRESS_MOST", "CacheGroup", "CacheRegion", "Cells", "Columns", "bounded"]

ADDRESS_MOST = 2**63 - 1
LAYER_MOST = 2**16
TRANSPOSED = "HTN"
"""Heads outermost; of each all of K, then all of V; K by number of the vector, V by token."""
AXES = ("HN", "NH", "KHN", "KNH", "HKN", "NKH", "HNK", "NHK", TRANSPOSED)
"""Orders of a page's axes, outermost first: K and V, heads, tokens; within lies a head's vector."""


def bounded(name: str, value: int, least: int, most: int) -> None:
    """Raise a ConfigurationError unless `value` is an integer within both bounds."""
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
        bounded("address", self.address, 0, ADDRESS_MOST)
        bounded("block_bytes", self.block_bytes, 1, ADDRESS_MOST)
        bounded("block_count", self.block_count, 1, BLOCK_ID_MOST)
        bounded("device", self.device, -1, RANKS_MOST)
        bounded("block_stride_bytes", self.block_stride_bytes, self.block_bytes, ADDRESS_MOST)
        if self.address + self.length_bytes > ADDRESS_MOST:
            raise ConfigurationError("block_count", self.block_count, "blocks inside the memory")

    @property
    def length_bytes(self) -> int:
        """From the first byte of the first block to the last byte of the last one."""
        return (self.block_count - 1) * self.block_stride_bytes + self.block_bytes


@frozen
class Cells:
    """Where the tokens and heads of a group lie in a block.

    A cell is what one head keeps of one token, K or V or both: `cell_bytes` that lie together. A
    page is a whole array of cells; a block is one page, or several, one after the other.

    Attributes:
        axes: Order of a page's axes, outermost first: one of `AXES`; K is left out where
            `planes` is 1. Where K is transposed (``HTN``) its cells do not lie together.
        heads_total: KV heads of the whole model; 1 for a latent that every rank holds (MLA).
        page_tokens: Tokens per page.
        planes: 2 where K and V are cells of their own in one region, else 1.
        element_bytes: Bytes of one number of a vector, where K is transposed; else 0.

    Raises:
        ConfigurationError: A number is out of its bounds, or the axes are unknown.
    """

    axes: str
    heads_total: int
    page_tokens: int
    planes: int = 1
    element_bytes: int = 0

    def __attrs_post_init__(self) -> None:
        transposed = self.axes == TRANSPOSED
        bounded("element_bytes", self.element_bytes, int(transposed), 64 * int(transposed))
        bounded("heads_total", self.heads_total, 1, TOKENS_MOST)
        bounded("page_tokens", self.page_tokens, 1, TOKENS_MOST)
        bounded("planes", self.planes, 1, 2)
        apart = "K" in self.axes or transposed
        if self.axes not in AXES or apart != (self.planes > 1):
            raise ConfigurationError(
                "axes", self.axes, f"one of {AXES}, with K or T where planes is not 1"
            )

    def steps(self, heads: int, cell_bytes: int) -> list[dict[str, int]]:
        """For each plane, in bytes: where it begins in a page, and the step along each axis.

        Keys are ``first``, ``H`` (heads), ``N`` (tokens) and ``C`` (the numbers of a vector).
        """
        number = self.element_bytes or cell_bytes
        if self.axes == TRANSPOSED:
            half = self.page_tokens * cell_bytes
            step = {"first": 0, "H": 2 * half, "N": number, "C": self.page_tokens * number}
            return [step, step | {"first": half, "N": cell_bytes, "C": number}]
        sizes = {"K": self.planes, "H": heads, "N": self.page_tokens}
        step, stride = {"C": number}, cell_bytes
        for axis in reversed(self.axes):
            step[axis] = stride
            stride *= sizes[axis]
        return [step | {"first": plane * step.get("K", 0)} for plane in range(self.planes)]


@frozen
class Columns:
    """The regions of a group as arrays of shape (regions,), dtype uint64."""

    address: NDArray[np.uint64]
    stride: NDArray[np.uint64]
    length: NDArray[np.uint64]


def _columns(group: CacheGroup) -> Columns:
    regions = group.regions
    stride = np.array([each.block_stride_bytes for each in regions], dtype=np.uint64)
    length = np.array([each.block_bytes for each in regions], dtype=np.uint64)
    address = np.array([each.address for each in regions], dtype=np.uint64)
    return Columns(address, stride, length)


@frozen
class CacheGroup:
    """Layers that share block ids.

    Attributes:
        block_tokens: Tokens per block.
        regions: One per layer, or one per K or V half, in the order of the layers.
        cells: What a block holds; None for opaque blocks.
        layers: The layer of each region, counted over all pipeline stages; ascending. By default
            each region is a layer of its own.
        layers_total: Layers of this group in all pipeline stages; by default those that are here.
        window_tokens: Tokens that are kept, of a sliding window; 0 for all.

    Raises:
        ConfigurationError: A number is out of bounds, there is no region, or cells do not fill a
            block.
    """

    block_tokens: int
    regions: tuple[CacheRegion, ...]
    cells: Cells | None = None
    layers: tuple[int, ...] = Factory(lambda self: tuple(range(len(self.regions))), takes_self=True)
    layers_total: int = Factory(lambda self: len(set(self.layers)), takes_self=True)
    window_tokens: int = 0
    block_count: int = field(init=False, eq=False, repr=False)
    """Block ids below this exist in every region."""
    columns: Columns = field(init=False, eq=False, repr=False)
    keys: tuple[tuple[int, int], ...] = field(init=False, eq=False, repr=False)
    """What names a region at both ends: its layer, and its number within that."""

    def __attrs_post_init__(self) -> None:
        bounded("block_tokens", self.block_tokens, 1, TOKENS_MOST)
        bounded("window_tokens", self.window_tokens, 0, TOKENS_MOST)
        if not self.regions:
            raise ConfigurationError("regions", self.regions, "at least one region")
        if len(self.layers) != len(self.regions) or list(self.layers) != sorted(self.layers):
            raise ConfigurationError(
                "layers", self.layers[:8], f"{len(self.regions)} numbers, ascending"
            )
        for layer in (self.layers[0], self.layers[-1]):
            bounded("layers", layer, 0, LAYER_MOST)
        bounded("layers_total", self.layers_total, len(set(self.layers)), LAYER_MOST + 1)
        if self.cells is not None and self.block_tokens % self.cells.page_tokens:
            raise ConfigurationError(
                "page_tokens",
                self.cells.page_tokens,
                f"a divisor of block_tokens = {self.block_tokens}",
            )
        count = min(each.block_count for each in self.regions)
        object.__setattr__(self, "block_count", count)
        object.__setattr__(self, "columns", _columns(self))
        seen: Counter[int] = Counter()
        keys = []
        for layer in self.layers:
            keys.append((layer, seen[layer]))
            seen[layer] += 1
        object.__setattr__(self, "keys", tuple(keys))

    @property
    def heads_total(self) -> int:
        """KV heads of the whole model; `NO_HEADS` for opaque blocks."""
        return NO_HEADS if self.cells is None else self.cells.heads_total

    def cell_bytes(self, heads: int) -> tuple[int, ...]:
        """Bytes of a cell of each region, where a block holds so many heads.

        Raises:
            ConfigurationError: A block is no whole number of cells.
        """
        assert self.cells is not None, "opaque blocks have no cells"
        cells = self.block_tokens * heads * self.cells.planes
        for region in self.regions:
            if region.block_bytes % cells:
                raise ConfigurationError(
                    "block_bytes",
                    region.block_bytes,
                    f"a multiple of {cells}: block_tokens x heads here x planes",
                )
            if region.block_bytes // cells % (self.cells.element_bytes or 1):
                raise ConfigurationError(
                    "element_bytes", self.cells.element_bytes, "a divisor of a cell's bytes"
                )
        return tuple(region.block_bytes // cells for region in self.regions)

    def blocks_of(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens from a block's start on; the last may be partial."""
        return -(-tokens // self.block_tokens)

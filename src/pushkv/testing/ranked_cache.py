"""A reference engine's KV cache, split over ranks as an inference engine splits it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pushkv.layout import CacheGroup, CacheLayout, CacheRegion, Cells
from pushkv.rank_plan import Ranks, heads_held

from .reference_cache import KV_BYTES, ReferenceCache

__all__ = ["RankedCache"]


class RankedCache(ReferenceCache):
    """Layers in runs over pipeline stages, heads over tensor-parallel ranks, in memory per rank.

    Of a token and layer there are 64 bytes, however many heads share them; so engines of different
    ranks, axes and block sizes answer alike if every byte is right. A head that several ranks hold
    must be the same at all of them.

    Args:
        ranks: How the cache is split.
        axes: ``HN`` or ``NH``: heads or tokens first in a block.
        heads: KV heads, a divisor of 64; 1 is a latent that every rank holds.
    """

    def __init__(
        self,
        ranks: Ranks,
        axes: str = "HN",
        heads: int = 8,
        layers: int = 4,
        block_count: int = 64,
        block_tokens: int = 16,
    ) -> None:
        super().__init__(0, block_count, block_tokens)
        self.layers = layers
        self.ranks = ranks
        self.axes = axes
        self.heads = heads
        self._memory: list[NDArray[np.uint8]] = []
        self._views: list[NDArray[np.uint8]] = []
        for rank in range(ranks.count):
            sizes = {"H": len(self._heads(rank)), "N": block_tokens}
            page = tuple(sizes[axis] for axis in axes)
            shape = (len(self._layers(rank)), block_count, *page, KV_BYTES // heads)
            memory = np.zeros(shape, dtype=np.uint8)
            self._memory.append(memory)
            self._views.append(memory if axes == "NH" else memory.swapaxes(2, 3))

    def _heads(self, rank: int) -> range:
        return heads_held(self.heads, self.ranks.tensor, rank % self.ranks.tensor)

    def _layers(self, rank: int) -> range:
        stage, stages = rank // self.ranks.tensor, self.ranks.pipeline
        return range(self.layers * stage // stages, self.layers * (stage + 1) // stages)

    def layout_of(self, rank: int) -> CacheLayout:
        """The geometry of a rank's part, with addresses."""
        held, size = self._layers(rank), self._memory[rank][0, 0].nbytes
        regions = tuple(
            CacheRegion(memory.ctypes.data, size, self.block_count) for memory in self._memory[rank]
        )
        group = CacheGroup(
            self.block_tokens,
            regions,
            Cells(self.axes, self.heads, self.block_tokens),
            tuple(held),
            self.layers,
        )
        stage, tensor = divmod(rank, self.ranks.tensor)
        return CacheLayout(
            (group,), "uint8", "any", self.ranks.tensor, tensor, self.ranks.pipeline, stage
        )

    def read(self, blocks: tuple[int, ...], start: int, end: int) -> NDArray[np.uint8]:
        """As of a cache in one piece; replicas must agree."""
        first = start // self.block_tokens
        ids = list(blocks[first : self.blocks_of(end)])
        skipped = first * self.block_tokens
        cell = KV_BYTES // self.heads
        found = np.zeros((self.layers, end - start, self.heads, cell), dtype=np.uint8)
        seen = np.zeros((self.layers, self.heads), dtype=bool)
        for rank, view in enumerate(self._views):
            layers, heads = self._layers(rank), self._heads(rank)
            tokens = view[:, ids].reshape(len(layers), -1, len(heads), cell)
            part = tokens[:, start - skipped : end - skipped]
            place = (slice(layers.start, layers.stop), slice(None), slice(heads.start, heads.stop))
            if seen[place[0], place[2]].any():
                assert np.array_equal(found[place], part), f"rank {rank} differs from its replica"
            found[place] = part
            seen[place[0], place[2]] = True
        assert seen.all(), "a head of a layer is nowhere"
        return found.reshape(self.layers, end - start, KV_BYTES)

    def write(self, blocks: tuple[int, ...], at: int, kv: NDArray[np.uint8]) -> None:
        """As of a cache in one piece, at every rank that holds a part of it."""
        block, offset = blocks[at // self.block_tokens], at % self.block_tokens
        cells = kv.reshape(self.layers, self.heads, -1)
        for rank, view in enumerate(self._views):
            layers, heads = self._layers(rank), self._heads(rank)
            part = cells[layers.start : layers.stop, heads.start : heads.stop]
            view[:, block, offset] = part

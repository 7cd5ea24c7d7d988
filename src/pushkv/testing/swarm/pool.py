"""One rank's KV cache in real memory: every block has one holder, and that holder's bytes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from pushkv.core.ids import TransferId
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion
from pushkv.model.faults import mix

__all__ = ["BLOCK_TOKENS", "Holder", "Pool", "ViolationError", "pattern"]

BLOCK_TOKENS = 16
LAYERS = 2
WORDS = 4
BLOCK_BYTES = 8 * WORDS

_Words = NDArray[np.uint64]


class ViolationError(AssertionError):
    """Something that must hold does not."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail


@frozen
class Holder:
    """Who has a block: an attempt, a prompt's source, or a request that decodes."""

    kind: str
    transfer: TransferId
    attempt: int = -1


@lru_cache(maxsize=65_536)
def pattern(serial: int, index: int) -> _Words:
    """What block `index` of prompt `serial` holds; shape (layers, words). All words differ."""
    first = np.array([mix(serial, index, layer) for layer in range(LAYERS)], dtype=np.uint64)
    words = first[:, np.newaxis] + np.arange(WORDS, dtype=np.uint64)
    words.flags.writeable = False
    return words


class Pool:
    """Blocks and who holds them. A block that is given back is written over at once.

    The engine of a new life finds all blocks free, and in the memory what was left there.
    """

    def __init__(self, name: str, blocks: int, seed: int) -> None:
        self.name = name
        self.blocks = blocks
        self.memory: _Words = np.zeros((LAYERS, blocks, WORDS), dtype=np.uint64)
        self.holders: list[Holder | None] = [None] * blocks
        self.free: dict[int, None] = {}
        self.held: dict[Holder, tuple[int, ...]] = {}
        self._held_blocks = 0
        self._touched: set[int] = set()
        self._serial = mix(seed, blocks)
        self._junk = np.zeros_like(self.memory)
        self.begin()

    @property
    def layout(self) -> CacheLayout:
        """The geometry, with addresses."""
        regions = tuple(
            CacheRegion(self.memory[layer].ctypes.data, BLOCK_BYTES, self.blocks)
            for layer in range(LAYERS)
        )
        return CacheLayout((CacheGroup(BLOCK_TOKENS, regions),), "uint64", "NHD")

    def begin(self) -> None:
        """A new life: nobody holds anything."""
        self.holders = [None] * self.blocks
        self.held = {}
        self._held_blocks = 0
        self.free = dict.fromkeys(range(self.blocks))
        self._scribble(tuple(self.free))

    def _scribble(self, blocks: tuple[int, ...]) -> None:
        """Whoever has the blocks next writes into them: words that were nowhere before."""
        shape = LAYERS, len(blocks), WORDS
        count = LAYERS * len(blocks) * WORDS
        words = np.arange(count, dtype=np.uint64) + np.uint64(self._serial)
        self._serial = (self._serial + count) % (1 << 64)
        self._junk[:, blocks] = words.reshape(shape)
        self.memory[:, blocks] = self._junk[:, blocks]
        self._touched.update(blocks)

    def take(self, count: int, holder: Holder) -> tuple[int, ...] | None:
        """Blocks, those given back last first; None where too few are free.

        Raises:
            ViolationError: Somebody wrote into one of them since it was given back.
        """
        if count > len(self.free):
            return None
        taken = tuple(self.free.popitem()[0] for _ in range(count))
        written = (self.memory[:, taken] != self._junk[:, taken]).any(axis=(0, 2))
        if written.any():
            block = taken[int(written.argmax())]
            raise ViolationError("I1", f"{self.name}: block {block} was written while free")
        for block in taken:
            self.holders[block] = holder
        self.held[holder] = taken
        self._held_blocks += count
        self._touched.update(taken)
        return taken

    def give(self, holder: Holder) -> None:
        """All blocks of `holder` are free, and used for something else at once."""
        blocks = self.held.pop(holder)
        for block in blocks:
            if self.holders[block] != holder:
                raise ViolationError("I4", f"{self.name}: {holder} has no block {block}")
            self.holders[block] = None
            self.free[block] = None
        self._held_blocks -= len(blocks)
        self._scribble(blocks)

    def hand_over(self, before: Holder, after: Holder) -> None:
        """Blocks change hands, their bytes with them."""
        blocks = self.held.pop(before)
        self.held[after] = blocks
        for block in blocks:
            self.holders[block] = after
        self._touched.update(blocks)

    def fill(self, holder: Holder, serial: int, start: int, first: int, until: int) -> None:
        """The engine computes a holder's blocks [first, until).

        The holder's first block is the prompt's block `start`.
        """
        for index, block in enumerate(self.held[holder][first:until], start=start + first):
            self.memory[:, block] = pattern(serial, index)

    def verify(self, holder: Holder, serial: int, start: int, invariant: str) -> None:
        """Every byte is the prompt's; the holder's first block is the prompt's block `start`.

        Raises:
            ViolationError: A byte is not.
        """
        for index, block in enumerate(self.held[holder], start=start):
            if not np.array_equal(self.memory[:, block], pattern(serial, index)):
                raise ViolationError(
                    invariant,
                    f"{self.name}: block {block}, {index} of the prompt, of {holder} is wrong",
                )

    def check(self) -> None:
        """I4: every block is free or somebody's, once; looks where something was since the last.

        How many are free and held is counted over all; which, of those that changed hands.

        Raises:
            ViolationError: One is in no place, or in two.
        """
        for block in self._touched:
            holder = self.holders[block]
            places = int(block in self.free)
            if holder is not None:
                places += self.held.get(holder, ()).count(block)
            if places != 1:
                raise ViolationError("I4", f"{self.name}: block {block} is in {places} places")
        self._touched.clear()
        if len(self.free) + self._held_blocks != self.blocks:
            raise ViolationError(
                "I4", f"{self.name}: {len(self.free)} + {self._held_blocks} of {self.blocks} blocks"
            )

    def check_all(self) -> None:
        """I4 again, over all blocks and without what `check` keeps.

        Raises:
            ViolationError: One is in no place, or in two.
        """
        places = list(self.free)
        for blocks in self.held.values():
            places += blocks
        if len(places) != self.blocks or len(set(places)) != self.blocks:
            raise ViolationError("I4", f"{self.name}: {sorted(places)} of {self.blocks} blocks")

    def locate(self, address: int, length: int) -> list[tuple[int, int, int, int]]:
        """What a range of memory is: layer, block, first byte within it and how many, each."""
        offset = address - self.memory.ctypes.data
        found = []
        while length > 0:
            row, within = divmod(offset, BLOCK_BYTES)
            count = min(BLOCK_BYTES - within, length)
            found.append((*divmod(row, self.blocks), within, count))
            offset += count
            length -= count
        return found

    def bytes_at(self, layer: int, block: int, first: int, count: int) -> bytes:
        """What is there."""
        whole: bytes = self.memory[layer, block].tobytes()
        return whole[first : first + count]

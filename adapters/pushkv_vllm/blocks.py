"""Pins: blocks of vLLM's pool that outlive, or are held apart from, the request that had them.

A block that is registered may be written until the core says `BlocksReleased`; one that is read may
be read until `SourceReleased`. Both may come long after vLLM has finished, failed or aborted the
request. So each pin takes a reference of its own in the pool, and vLLM's own accounting does the
rest: a request that fails re-runs on other blocks at once, and the old ones return to the pool when
they are safe.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from attrs import define, field

from pushkv.core.ids import NO_BLOCK, Blocks

__all__ = ["Admission", "Block", "BlockPool", "Pins", "admit", "held", "numbers"]

Key = TypeVar("Key", bound=Hashable)


class Block(Protocol):
    """What this module needs of `vllm.v1.core.kv_cache_utils.KVCacheBlock`."""

    block_id: int
    is_null: bool


class BlockPool(Protocol):
    """What this module needs of `vllm.v1.core.block_pool.BlockPool`."""

    blocks: Sequence[Block]

    def touch(self, blocks: Sequence[Block]) -> None:
        """Take a reference to each block."""

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Give a reference to each block back; the first is reused first."""


class Admission(StrEnum):
    """Whether more blocks may be exposed to a producer."""

    NOW = "now"
    LATER = "later"
    """When attempts that still run have ended, which each does within a bound."""
    NEVER = "never"
    """Waiting will not help: the rest is quarantined, or the need is too large."""


@define
class Pins(Generic[Key]):
    """Blocks held under keys; on the scheduler's thread only.

    Attributes:
        pool: vLLM's block pool.
        held: Blocks held now, counted with multiplicity.
    """

    pool: BlockPool
    held: int = 0
    _by_key: dict[Key, list[Block]] = field(factory=dict)

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def pin(self, key: Key, blocks: Iterable[Block]) -> None:
        """Hold `blocks` until `unpin`. A key holds once."""
        assert key not in self._by_key, f"{key} is already pinned"
        real = [block for block in blocks if not block.is_null]
        self.pool.touch(real)
        self._by_key[key] = real
        self.held += len(real)

    def extend(self, key: Key, blocks: Iterable[Block]) -> None:
        """Hold those of `blocks` too that `key` does not hold yet."""
        held = self._by_key.setdefault(key, [])
        known = {block.block_id for block in held}
        new = [each for each in blocks if not each.is_null and each.block_id not in known]
        self.pool.touch(new)
        held += new
        self.held += len(new)

    def unpin(self, key: Key) -> bool:
        """Give the blocks of `key` back, if it holds any. Returns whether it did."""
        blocks = self._by_key.pop(key, None)
        if blocks is None:
            return False
        self.held -= len(blocks)
        # The tail of a prompt is the part least likely to be asked for again: reuse it first.
        self.pool.free_blocks(reversed(blocks))
        return True

    def held_by(self, keys: Iterable[Key]) -> int:
        """Blocks held under these keys."""
        return sum(len(self._by_key.get(key, ())) for key in keys)


def numbers(ids: Sequence[int], pool: BlockPool) -> tuple[int, ...]:
    """Block ids as pushkv knows them: vLLM's null block, for what left a window, is none."""
    if 0 in ids and pool.blocks[0].is_null:
        return tuple(NO_BLOCK if each == 0 else each for each in ids)
    return tuple(ids)


def held(blocks: Blocks, pool: BlockPool) -> Iterator[Block]:
    """The blocks of these ids."""
    return (pool.blocks[each] for group in blocks for each in group if each != NO_BLOCK)


def admit(needed: int, held: int, ending: int, budget: int) -> Admission:
    """Whether `needed` more blocks may be exposed.

    Args:
        needed: Blocks to register.
        held: Blocks pinned as destinations now, quarantined ones included.
        ending: Those of `held` whose attempts still run.
        budget: The most blocks that may be exposed or quarantined at once.
    """
    if held + needed <= budget:
        return Admission.NOW
    return Admission.LATER if held - ending + needed <= budget else Admission.NEVER

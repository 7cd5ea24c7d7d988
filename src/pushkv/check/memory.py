"""A consumer's block memory: what an engine does to it, and whom a freed block goes to at once."""

from __future__ import annotations

from attrs import evolve

from pushkv.core.ids import AttemptId
from pushkv.model import blocks as model
from pushkv.model.blocks import BlockMemory

__all__ = [
    "OTHERS",
    "STARTING",
    "anyone",
    "begin",
    "delivered",
    "hand_out",
    "holder",
    "landed",
    "not_delivered",
    "released",
    "reserve",
]

OTHERS = "somebody else"
STARTING = "nobody yet"
Broken = tuple[tuple[str, str], ...]


def holder(attempt: AttemptId) -> AttemptId:
    """In whose name an attempt holds its blocks: that of all its producer ranks."""
    return evolve(attempt, producer_rank=-1)


def begin(blocks: int, ranks: int, owner: str) -> BlockMemory:
    """All blocks are somebody else's."""
    memory, _ = model.own(BlockMemory(blocks, ranks), owner, blocks)
    return memory


def hand_out(memory: BlockMemory) -> BlockMemory:
    """A new life begins to serve (R13): every block is somebody's."""
    return anyone(model.free(memory, memory.held_by(STARTING)))


def anyone(memory: BlockMemory) -> BlockMemory:
    """Free blocks are somebody else's at once, with their own bytes in them."""
    if not memory.free:
        return memory
    memory, taken = model.own(memory, OTHERS, len(memory.free))
    return model.fill(memory, OTHERS, taken)


def reserve(
    memory: BlockMemory, attempt: AttemptId, count: int
) -> tuple[BlockMemory, tuple[int, ...]] | None:
    """Blocks for an attempt, those first that were given up last; None if there are too few."""
    theirs = memory.held_by(OTHERS)[::-1][:count]
    if len(theirs) < count:
        return None
    memory, taken = model.reserve(model.free(memory, theirs), holder(attempt), count)
    return memory, taken


def released(memory: BlockMemory, attempt: AttemptId) -> BlockMemory:
    """An attempt's blocks go back, and on to somebody else."""
    name = holder(attempt)
    return anyone(model.release(memory, name, memory.held_by(name), None))


def not_delivered(memory: BlockMemory, attempt: AttemptId) -> BlockMemory:
    """What may still be written belongs to nobody (R2)."""
    return model.quarantine(memory, holder(attempt))


def landed(
    memory: BlockMemory, piece: int, attempt: AttemptId, part: int
) -> tuple[BlockMemory, Broken]:
    """Bytes land (I1). A life that serves nobody yet has nothing to lose."""
    held = [
        each.holder for each in memory.holdings if each.block == piece // memory.pieces_per_block
    ]
    if held == [STARTING]:
        return memory, ()
    after = model.land(memory, piece, holder(attempt), part)
    return after, tuple((each.invariant, each.detail) for each in model.violations(after))


def delivered(memory: BlockMemory, attempt: AttemptId, start: int, end: int) -> Broken:
    """I2: every byte of the attempt is in place, from every rank."""
    mine = memory.held_by(holder(attempt))
    missing = len(mine) < end - start or not model.holds_all_of(
        memory, mine, holder(attempt), frozenset(range(PARTS_MOST))
    )
    return (("I2", f"{attempt.transfer} is delivered without all of its bytes"),) if missing else ()


PARTS_MOST = 64

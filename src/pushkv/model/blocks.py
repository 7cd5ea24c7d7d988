"""Block memory: who holds each block, and whose bytes are in it.

A block is free, owned by a request of the engine, reserved for an attempt, being written by it, or
quarantined. The engine hands a freed block to somebody else at once. The bookkeeping is kept as an
engine keeps it, in lists, and mistakes are carried out rather than refused: a block that is
released twice is in two places, a WRITE that comes too late is in somebody else's bytes.
`violations` finds both.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from attrs import evolve, field, frozen

from pushkv.core.errors import LocalProtocolError
from pushkv.core.ids import AttemptId

__all__ = [
    "BlockMemory",
    "Holding",
    "Stamp",
    "Trespass",
    "Use",
    "Violation",
    "fill",
    "free",
    "holds_all_of",
    "land",
    "own",
    "quarantine",
    "read",
    "release",
    "reserve",
    "violations",
]


class Use(StrEnum):
    """What a block is used for; each block is in exactly one use (I4)."""

    OWNED = "owned"
    RESERVED = "reserved"
    WRITING = "being_written"
    QUARANTINED = "quarantined"


@frozen
class Holding:
    """One block that is not free: what for, and by which request or attempt."""

    block: int
    use: Use
    holder: str | AttemptId


@frozen
class Stamp:
    """Whose bytes a piece of a block holds: those of a part, or the engine's own (part -1)."""

    writer: str | AttemptId
    part: int = -1


@frozen
class Trespass:
    """Bytes of an attempt went into, or came out of, a block that it does not hold."""

    block: int
    attempt: AttemptId
    part: int
    found: tuple[str, ...]
    reads: bool = False


@frozen
class Violation:
    """An invariant that does not hold, and where."""

    invariant: str
    detail: str


@frozen
class BlockMemory:
    """All blocks of one rank.

    Attributes:
        total: How many blocks there are.
        pieces_per_block: In how many pieces a block is written; piece p is in block
            p // pieces_per_block.
        free: Free blocks, ascending.
        holdings: Blocks in use, in the order in which they were taken.
        contents: Whose bytes each piece holds; None where none were ever written.
        trespasses: What I1 forbids and happened, in order.
    """

    total: int
    pieces_per_block: int = 1
    free: tuple[int, ...] = field()
    holdings: tuple[Holding, ...] = ()
    contents: tuple[Stamp | None, ...] = field()
    trespasses: tuple[Trespass, ...] = ()

    @free.default
    def _all_of_them(self) -> tuple[int, ...]:
        return tuple(range(self.total))

    @contents.default
    def _empty(self) -> tuple[Stamp | None, ...]:
        return (None,) * (self.total * self.pieces_per_block)

    def held_by(self, holder: str | AttemptId) -> tuple[int, ...]:
        """Blocks that a request or an attempt holds, in the order in which it took them."""
        return tuple(each.block for each in self.holdings if each.holder == holder)

    def pieces(self, block: int) -> range:
        """The pieces of one block."""
        return range(block * self.pieces_per_block, (block + 1) * self.pieces_per_block)


# -- the engine's doing


def own(memory: BlockMemory, owner: str, count: int) -> tuple[BlockMemory, tuple[int, ...]]:
    """`owner` takes the first `count` free blocks, and their number is told.

    Raises:
        LocalProtocolError: Fewer are free.
    """
    return _take(memory, count, Use.OWNED, owner)


def reserve(
    memory: BlockMemory, attempt: AttemptId, count: int
) -> tuple[BlockMemory, tuple[int, ...]]:
    """The first `count` free blocks are reserved for an attempt to write into.

    Raises:
        LocalProtocolError: Fewer are free.
    """
    return _take(memory, count, Use.RESERVED, attempt)


def _take(
    memory: BlockMemory, count: int, use: Use, holder: str | AttemptId
) -> tuple[BlockMemory, tuple[int, ...]]:
    if count > len(memory.free):
        raise LocalProtocolError(f"{count} blocks are wanted and {len(memory.free)} are free")
    taken = memory.free[:count]
    holdings = (*memory.holdings, *(Holding(block, use, holder) for block in taken))
    return evolve(memory, free=memory.free[count:], holdings=holdings), taken


def free(memory: BlockMemory, blocks: tuple[int, ...]) -> BlockMemory:
    """Blocks go back to the pool, whoever holds them; their bytes stay where they are."""
    left = tuple(each for each in memory.holdings if each.block not in blocks)
    return evolve(memory, free=tuple(sorted((*memory.free, *blocks))), holdings=left)


def quarantine(memory: BlockMemory, attempt: AttemptId) -> BlockMemory:
    """An attempt's blocks may still be written and belong to nobody (R2)."""
    return _use(memory, attempt, Use.QUARANTINED, attempt)


def release(
    memory: BlockMemory, attempt: AttemptId, blocks: tuple[int, ...], owner: str | None
) -> BlockMemory:
    """An attempt gives its blocks up: to `owner`, to whom they were delivered, or to the pool.

    `blocks` are those it was given; releasing them a second time puts them into the pool twice.
    """
    if owner is None:
        return free(memory, blocks)
    return _use(memory, attempt, Use.OWNED, owner)


def _use(
    memory: BlockMemory, holder: str | AttemptId, use: Use, after: str | AttemptId
) -> BlockMemory:
    holdings = tuple(
        Holding(each.block, use, after) if each.holder == holder else each
        for each in memory.holdings
    )
    return evolve(memory, holdings=holdings)


def fill(memory: BlockMemory, owner: str, blocks: tuple[int, ...]) -> BlockMemory:
    """The engine computes KV into its own blocks."""
    pieces = {piece for block in blocks for piece in memory.pieces(block)}
    return evolve(memory, contents=_stamped(memory, pieces, Stamp(owner)))


# -- the transport's doing


def land(memory: BlockMemory, piece: int, attempt: AttemptId, part: int) -> BlockMemory:
    """Bytes of a part land in `piece`, whoever holds its block by now.

    A block that is reserved by the attempt is being written from here on; any other holder, or
    none, makes this a trespass (I1).
    """
    block = piece // memory.pieces_per_block
    contents = _stamped(memory, {piece}, Stamp(attempt, part))
    found = [each for each in memory.holdings if each.block == block]
    allowed = [each for each in found if each.holder == attempt]
    if len(found) != 1 or len(allowed) != 1:
        trespass = Trespass(block, attempt, part, _described(memory, block))
        trespasses = (*memory.trespasses, trespass)
        return evolve(memory, contents=contents, trespasses=trespasses)
    if allowed[0].use is not Use.RESERVED:
        return evolve(memory, contents=contents)
    writing = evolve(allowed[0], use=Use.WRITING)
    holdings = tuple(writing if each is allowed[0] else each for each in memory.holdings)
    return evolve(memory, contents=contents, holdings=holdings)


def read(memory: BlockMemory, block: int, owner: str, attempt: AttemptId, part: int) -> BlockMemory:
    """A WRITE reads a source block that was `owner`'s when it was posted (I1, second half)."""
    if [each.holder for each in memory.holdings if each.block == block] == [owner]:
        return memory
    trespass = Trespass(block, attempt, part, _described(memory, block), reads=True)
    return evolve(memory, trespasses=(*memory.trespasses, trespass))


def _described(memory: BlockMemory, block: int) -> tuple[str, ...]:
    used = tuple(f"{each.use} by {each.holder}" for each in memory.holdings if each.block == block)
    return (*used, *("free" for each in memory.free if each == block))


def _stamped(memory: BlockMemory, pieces: set[int], stamp: Stamp) -> tuple[Stamp | None, ...]:
    return tuple(
        stamp if piece in pieces else before for piece, before in enumerate(memory.contents)
    )


# -- what must hold


def holds_all_of(
    memory: BlockMemory, blocks: tuple[int, ...], attempt: AttemptId, parts: frozenset[int]
) -> bool:
    """Whether every piece of `blocks` was last written by one of the attempt's `parts` (I2)."""
    stamps = (memory.contents[piece] for block in blocks for piece in memory.pieces(block))
    return all(
        stamp is not None and stamp.writer == attempt and stamp.part in parts for stamp in stamps
    )


def violations(memory: BlockMemory) -> tuple[Violation, ...]:
    """Every breach of I1 and I4 so far, in words."""
    found = [
        Violation(
            "I1",
            f"part {each.part} of {each.attempt} {'reads' if each.reads else 'lands in'} block "
            f"{each.block}, which is {' and '.join(each.found) or 'lost'}",
        )
        for each in memory.trespasses
    ]
    places = Counter(memory.free)
    places.update(each.block for each in memory.holdings)
    found.extend(
        Violation("I4", f"block {block} is in {places[block]} places: {_described(memory, block)}")
        for block in sorted({*range(memory.total), *places})
        if places[block] != 1 or not 0 <= block < memory.total
    )
    return tuple(found)

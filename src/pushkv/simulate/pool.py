"""The KV blocks of one engine: who has how many, and which."""

from __future__ import annotations

from pushkv.core.errors import LocalProtocolError

__all__ = ["Pool"]


class Pool:
    """Block ids, handed out and given back; none twice."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks))
        self._held: dict[str, tuple[int, ...]] = {}
        self.held_most = 0

    @property
    def held_blocks(self) -> int:
        """Blocks that somebody has."""
        return self.blocks - len(self._free)

    def take(self, holder: str, number: int) -> tuple[int, ...] | None:
        """Blocks for `holder`, who has none; None if there are not enough."""
        if holder in self._held:
            raise LocalProtocolError(f"{holder} has blocks already")
        if number > len(self._free):
            return None
        first = len(self._free) - number
        taken = tuple(self._free[first:])
        del self._free[first:]
        self._held[holder] = taken
        self.held_most = max(self.held_most, self.held_blocks)
        return taken

    def give_back(self, holder: str) -> None:
        """`holder` has none any more."""
        if holder not in self._held:
            raise LocalProtocolError(f"{holder} gives back what it has not")
        self._free.extend(self._held.pop(holder))

    def holders(self) -> tuple[str, ...]:
        """Who has blocks."""
        return tuple(self._held)

    def whole(self) -> bool:
        """Whether every block is free, and there once."""
        return not self._held and sorted(self._free) == list(range(self.blocks))

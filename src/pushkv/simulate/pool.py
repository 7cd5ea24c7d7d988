"""The KV blocks of one engine: who has how many, and which."""

from __future__ import annotations

from pushkv.core.errors import LocalProtocolError

__all__ = ["Pool"]


class Pool:
    """Block ids, handed out and given back; none twice. A pool that nobody uses takes no memory."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._given_back: list[int] = []
        self._fresh = 0
        self._held: dict[str, tuple[int, ...]] = {}
        self.held_blocks: int = 0
        self.held_most: int = 0

    def take(self, holder: str, number: int) -> tuple[int, ...] | None:
        """Blocks for `holder`, who has none; None if there are not enough."""
        if holder in self._held:
            raise LocalProtocolError(f"{holder} has blocks already")
        if number > self.blocks - self.held_blocks:
            return None
        first = max(0, len(self._given_back) - number)
        taken = self._given_back[first:]
        del self._given_back[first:]
        new = number - len(taken)
        taken.extend(range(self._fresh, self._fresh + new))
        self._fresh += new
        self._held[holder] = tuple(taken)
        self.held_blocks += number
        self.held_most = max(self.held_most, self.held_blocks)
        return self._held[holder]

    def give_back(self, holder: str) -> None:
        """`holder` has none any more."""
        if holder not in self._held:
            raise LocalProtocolError(f"{holder} gives back what it has not")
        blocks = self._held.pop(holder)
        self._given_back.extend(blocks)
        self.held_blocks -= len(blocks)

    def holders(self) -> tuple[str, ...]:
        """Who has blocks."""
        return tuple(self._held)

    def whole(self) -> bool:
        """Whether every block is free, and there once."""
        return not self._held and sorted(self._given_back) == list(range(self._fresh))

"""What a search knows at any moment, so that it can go on from there."""

from __future__ import annotations

from array import array

from attrs import define, field, frozen

from .configurations import Configuration
from .liveness import Graph
from .moves import Move
from .world import Broken, State, World

__all__ = ["Search", "Violation", "begin"]


@frozen
class Violation:
    """A property that does not hold, and the shortest way there.

    Attributes:
        broken: (property, detail) of each.
        path: The states on the way, the first initial; the last move is made in the last of them.
        moves: One for each state of the path.
    """

    broken: Broken
    path: tuple[State, ...]
    moves: tuple[Move, ...]


@define
class Search:
    """A search that can be taken up again: what is known, and what is next.

    States are numbered in the order in which they are seen, and looked at in that order.

    Attributes:
        index: The number of every state seen.
        states: The same by number.
        parents: By number, the state from which each was first reached; -1 for the initial one.
        looked: States looked at; the next one's number.
        layer_end: The number of the first state that is further than `depth`.
        graph: All edges, where something must come about in the end.
    """

    world: World
    index: dict[State, int]
    states: list[State]
    parents: array[int]
    looked: int = 0
    layer_end: int = 1
    depth: int = 0
    edges: int = 0
    violations: list[Violation] = field(factory=list)
    graph: Graph | None = None

    @property
    def frontier(self) -> int:
        """States seen and not looked at."""
        return len(self.states) - self.looked

    def path(self, at: int) -> tuple[State, ...]:
        """The states from the initial one to that of number `at`."""
        found: list[State] = []
        while at >= 0:
            found.append(self.states[at])
            at = self.parents[at]
        return tuple(reversed(found))


def begin(configuration: Configuration, *, merge: bool = True) -> Search:
    """A search that has seen the initial state.

    With `merge` states that are renamings of each other count as one, where the initial state is
    its own renaming. Not so where something must come about in the end: who is called what matters
    to who is owed a move.
    """
    world = World(configuration)
    initial = world.initial()
    merged = merge and not configuration.eventually
    world.renamings = tuple(each for each in world.renamings if merged and each(initial) == initial)
    run = Search(world, {initial: 0}, [initial], array("i", [-1]))
    if configuration.eventually:
        run.graph = Graph()
    return run

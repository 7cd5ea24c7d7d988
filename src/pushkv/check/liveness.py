"""What must come about in the end, under fairness: sound, by the components of the whole graph.

Fairness, as it is assumed: whatever is possible again and again happens in the end, but for faults,
which may stay away for ever. So a run that never reaches its goal either stops where nothing but a
fault is possible, or goes round in a component in which every other move that is possible somewhere
is also made. `trap` looks for both in the part of the graph where the goal is not reached.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from attrs import define, field, frozen

from .moves import Move
from .nodes import Node, Stage
from .world import State, World

__all__ = ["GOALS", "Graph", "Trap", "trap", "trap_from"]

Label = tuple[str, int, int, str]
FAULT = -1


@define
class Graph:
    """All edges of a search, by the number of the state they leave, in its order.

    Attributes:
        starts: By state, where its edges begin.
        marks: The label of each edge.
        targets: The state it leads to.
        labels: The number of each label.
    """

    starts: array[int] = field(factory=lambda: array("q"))
    marks: array[int] = field(factory=lambda: array("i"))
    targets: array[int] = field(factory=lambda: array("i"))
    labels: dict[Label, int] = field(factory=dict)

    def add(self, source: int, move: Move, target: int) -> None:
        """One edge; those of a state come together, and after those of lower numbers."""
        assert len(self.starts) <= source + 1, "states are looked at in order"
        while len(self.starts) <= source:
            self.starts.append(len(self.targets))
        label = FAULT
        if not move.cost or move.kind in ("fire", "refuse"):
            number = 0 if move.kind in ("post", "refuse", "write", "fire") else move.number
            name = (move.kind, move.at, number, move.name)
            label = self.labels.setdefault(name, len(self.labels))
        self.marks.append(label)
        self.targets.append(target)

    def _span(self, state: int) -> tuple[int, int]:
        starts, end = self.starts, len(self.targets)
        first = starts[state] if state < len(starts) else end
        return first, starts[state + 1] if state + 1 < len(starts) else end

    def labels_of(self, state: int) -> array[int]:
        """The labels of a state's edges."""
        first, end = self._span(state)
        return self.marks[first:end]

    def targets_of(self, state: int) -> array[int]:
        """Where a state's edges lead, in the order of `labels_of`."""
        first, end = self._span(state)
        return self.targets[first:end]


@frozen
class Trap:
    """A state from which the goal may stay away for ever, and how."""

    state: int
    why: str


def trap(graph: Graph, open_ended: set[int]) -> Trap | None:
    """A fair way never to leave `open_ended`, the states without the goal; None for none."""
    for state in sorted(open_ended):
        if all(label == FAULT for label in graph.labels_of(state)):
            return Trap(state, "nothing but a fault is possible any more")
    work = [open_ended]
    while work:
        for component in components(graph, work.pop()):
            inside: set[int] = set()
            possible: set[int] = set()
            for state in component:
                for label, target in zip(
                    graph.labels_of(state), graph.targets_of(state), strict=True
                ):
                    possible.add(label)
                    if target in component:
                        inside.add(label)
            if not inside - {FAULT}:
                continue
            missed = possible - inside - {FAULT}
            if not missed:
                return Trap(min(component), f"{len(component)} states may go round for ever")
            work.append({state for state in component if missed.isdisjoint(graph.labels_of(state))})
    return None


def components(graph: Graph, states: set[int]) -> Iterator[set[int]]:
    """The strongly connected components of the graph between `states` (Tarjan's)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in sorted(states):
        if root in order:
            continue
        calls: list[tuple[int, Iterator[int]]] = [(root, _targets(graph, root, states))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while calls:
            state, targets = calls[-1]
            target = next(targets, None)
            if target is None:
                calls.pop()
                if calls:
                    before = calls[-1][0]
                    low[before] = min(low[before], low[state])
                if low[state] == order[state]:
                    yield _unwound(stack, on_stack, state)
            elif target not in order:
                order[target] = low[target] = len(order)
                stack.append(target)
                on_stack.add(target)
                calls.append((target, _targets(graph, target, states)))
            elif target in on_stack:
                low[state] = min(low[state], order[target])


def _targets(graph: Graph, state: int, states: set[int]) -> Iterator[int]:
    return (target for target in graph.targets_of(state) if target in states)


def _unwound(stack: list[int], on_stack: set[int], last: int) -> set[int]:
    found: set[int] = set()
    while True:
        state = stack.pop()
        on_stack.discard(state)
        found.add(state)
        if state == last:
            return found


# -- goals


def _alive(world: World, state: State) -> Iterable[Node]:
    nodes = (world.node(state, at) for at in range(len(world.slots)))
    return (node for node in nodes if node.life)


def _ends(world: World, state: State) -> bool:
    """Nothing that was offered or sent is left over at anybody."""
    return all(
        not node.offers
        and not node.endpoint.consumers
        and not node.endpoint.requests
        and all(each.stage == Stage.RELEASED for each in node.prefills)
        for node in _alive(world, state)
    )


def _delivers(world: World, state: State) -> bool:
    """Every request was offered, delivered at every rank of its consumers, and given back."""
    if any(left for node in _alive(world, state) for _, left in node.offers_left):
        return False
    wanted = (
        each.name in world.node(state, at).delivered
        for at, slot in enumerate(world.slots)
        for each in world.configuration.transfers
        if slot.consumer and slot.engine in each.consumers
    )
    return all(wanted) and _ends(world, state)


def _frees(world: World, state: State) -> bool:
    """Every block that was offered has been given back."""
    return not any(node.offers or node.endpoint.consumers for node in _alive(world, state))


GOALS: dict[str, Callable[[World, State], bool]] = {
    "ends": _ends,
    "delivers": _delivers,
    "frees": _frees,
}
"""What may be asked for, by name."""


def trap_from(world: World, state: State) -> Trap | None:
    """How what the world's configuration promises may stay away for ever after `state`.

    Looks at everything that can follow; None where it comes about, or nothing is promised.
    """
    wanted = GOALS.get(world.configuration.eventually)
    if wanted is None:
        return None
    graph, states, index = Graph(), [state], {state: 0}
    for source in states:
        for move, after, _ in world.successors(source):
            if after not in index:
                index[after] = len(states)
                states.append(after)
            graph.add(index[source], move, index[after])
    return trap(graph, {index[each] for each in states if not wanted(world, each)})

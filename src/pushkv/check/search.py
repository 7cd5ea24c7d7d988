"""Breadth-first search of everything that can happen in one configuration."""

from __future__ import annotations

import pickle
import time
from array import array
from collections.abc import Callable, Hashable
from itertools import pairwise
from pathlib import Path

from attrs import define, field, frozen

from pushkv.core.errors import ConfigurationError

from .configurations import Configuration
from .liveness import GOALS, Graph, trap
from .moves import Move
from .world import Broken, State, World

__all__ = ["Found", "Progress", "Search", "Violation", "search"]


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


@frozen
class Progress:
    """How far a search is."""

    states: int
    edges: int
    frontier: int
    depth: int
    seconds: float


@define
class Search:
    """A search that can be taken up again: what is known, and what is next.

    Attributes:
        index: The number of every state seen, in the order in which they were seen.
        parents: By number, the state from which each was first reached; -1 for the initial one.
        layer: The states at `depth`; those before `at` have been looked at.
        following: States one move further, seen so far.
        graph: All edges, where something must come about in the end.
    """

    world: World
    index: dict[State, int]
    parents: array[int]
    layer: list[State]
    at: int = 0
    following: list[State] = field(factory=list)
    depth: int = 0
    edges: int = 0
    looked: int = 0
    violations: list[Violation] = field(factory=list)
    graph: Graph | None = None

    def path(self, at: int) -> tuple[State, ...]:
        """The states from the initial one to that of number `at`."""
        wanted: list[int] = []
        while at >= 0:
            wanted.append(at)
            at = self.parents[at]
        numbers = set(wanted)
        known = {number: state for state, number in self.index.items() if number in numbers}
        return tuple(known[number] for number in reversed(wanted))


@frozen
class Found:
    """What a search came to.

    Attributes:
        complete: Nothing is left to look at: within its bounds the configuration is exhausted.
        rows: Rows that fired, as (table, row).
        fingerprint: A digest of the set of states; 0 where none was asked for.
    """

    name: str
    states: int
    edges: int
    depth: int
    complete: bool
    seconds: float
    violations: tuple[Violation, ...]
    rows: frozenset[tuple[str, str]]
    fingerprint: int


def begin(configuration: Configuration) -> Search:
    """A search that has seen the initial state."""
    world = World(configuration)
    initial = world.initial()
    run = Search(world, {initial: 0}, array("i", [-1]), [initial])
    if configuration.eventually:
        run.graph = Graph()
    return run


def search(
    configuration: Configuration,
    *,
    states_most: int = 0,
    seconds_most: float = 0,
    progress: Callable[[Progress], None] | None = None,
    fingerprint: bool = False,
    checkpoint: Path | None = None,
) -> Found:
    """Search `configuration` until nothing is left, a property breaks, or a limit is reached.

    The search stops at the first violation, which is one of the shortest.

    Args:
        configuration: What to search.
        states_most: Stop after so many states; 0 for no limit.
        seconds_most: Stop after so long; 0 for no limit.
        progress: Called every few thousand states.
        fingerprint: Make a digest of all states, if the search is complete.
        checkpoint: Take up the search that was put down there, if any; put it down there when a
            limit is reached, and remove it when nothing is left.
    """
    started = time.monotonic()
    run = begin(configuration) if checkpoint is None else take_up(configuration, checkpoint)
    while run.layer and not run.violations:
        if _layer(run, started, states_most, seconds_most, progress):
            if checkpoint is not None:
                put_down(run, checkpoint)
            break
    if checkpoint is not None and not run.layer:
        checkpoint.unlink(missing_ok=True)
    if run.graph is not None and not run.layer and not run.violations:
        run.violations += _never_ending(run)
    return Found(
        configuration.name,
        len(run.index),
        run.edges,
        run.depth,
        not run.layer,
        time.monotonic() - started,
        tuple(run.violations),
        frozenset(run.world.nodes.rows),
        run.world.fingerprint(run.index) if fingerprint and not run.layer else 0,
    )


def _layer(
    run: Search,
    started: float,
    states_most: int,
    seconds_most: float,
    progress: Callable[[Progress], None] | None,
) -> bool:
    """Everything one move further. Returns whether a limit was reached."""
    index, parents, world, following = run.index, run.parents, run.world, run.following
    while run.at < len(run.layer):
        state = run.layer[run.at]
        mine = index[state]
        for move, after, broken in world.successors(state):
            run.edges += 1
            if broken:
                path = run.path(mine)
                run.violations.append(Violation(broken, path, _moves(world, path, move)))
                return False
            if after not in index:
                index[after] = len(parents)
                parents.append(mine)
                following.append(after)
            if run.graph is not None:
                run.graph.add(mine, move, index[after])
        run.at += 1
        run.looked += 1
        if run.looked % 2000 == 0:
            spent = time.monotonic() - started
            frontier = len(run.layer) - run.at + len(following)
            if progress is not None:
                progress(Progress(len(index), run.edges, frontier, run.depth, spent))
            enough = states_most and len(index) > states_most
            if enough or (seconds_most and spent > seconds_most):
                return True
    run.layer, run.at, run.following = following, 0, []
    run.depth += 1
    return False


def _moves(world: World, path: tuple[State, ...], last: Move | None) -> tuple[Move, ...]:
    """The moves along a path."""
    found: list[Move] = []
    for before, after in pairwise(path):
        found.append(next(move for move, state, _ in world.successors(before) if state == after))
    return tuple(found) if last is None else (*found, last)


def _never_ending(run: Search) -> list[Violation]:
    """Where what must come about may stay away for ever, although nobody is kept from anything."""
    assert run.graph is not None, "only a search with a graph is asked"
    world = run.world
    wanted = GOALS[world.configuration.eventually]
    open_ended = {number for state, number in run.index.items() if not wanted(world, state)}
    stuck = trap(run.graph, open_ended)
    if stuck is None:
        return []
    path = run.path(stuck.state)
    moves = _moves(world, path, None)
    return [Violation((("ends", stuck.why),), path, moves)]


# -- to be taken up later


@frozen
class _Checkpoint:
    """A search at rest. Parts of the world are kept by number, as in the states."""

    configuration: Configuration
    parts: tuple[tuple[Hashable, ...], ...]
    states: tuple[State, ...]
    parents: array[int]
    layer: tuple[int, ...]
    following: tuple[int, ...]
    depth: int
    edges: int
    looked: int
    rows: frozenset[tuple[str, str]]


def put_down(run: Search, path: Path) -> None:
    """Write a search to `path`, whole or not at all. One with a graph is not kept."""
    if run.graph is not None:
        return
    number = run.index
    rest = _Checkpoint(
        run.world.configuration,
        tuple(tuple(parts) for parts in run.world.parts()),
        tuple(run.index),
        run.parents,
        tuple(number[state] for state in run.layer[run.at :]),
        tuple(number[state] for state in run.following),
        run.depth,
        run.edges,
        run.looked,
        frozenset(run.world.nodes.rows),
    )
    draft = path.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(rest))
    draft.replace(path)


def take_up(configuration: Configuration, path: Path) -> Search:
    """The search at `path`, or a new one where there is none.

    The file is a pickle: only one's own may be read.

    Raises:
        ConfigurationError: It is a search of something else.
    """
    run = begin(configuration)
    if not path.exists():
        return run
    rest = pickle.loads(path.read_bytes())  # noqa: S301 - one's own, as the docstring says
    if not isinstance(rest, _Checkpoint) or rest.configuration != configuration:
        raise ConfigurationError("checkpoint", str(path), f"a search of {configuration.name}")
    run.world.nodes.rows.update(rest.rows)
    for parts, values in zip(run.world.parts(), rest.parts, strict=True):
        parts.refill(values)
    run.index = {state: number for number, state in enumerate(rest.states)}
    run.parents = rest.parents
    run.layer = [rest.states[number] for number in rest.layer]
    run.following = [rest.states[number] for number in rest.following]
    run.depth, run.edges, run.looked = rest.depth, rest.edges, rest.looked
    return run

"""Breadth-first search of everything that can happen in one configuration."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from .alone import Place, waits_for_ever, without_end
from .checkpoint import put_down, take_up
from .configurations import Configuration
from .liveness import GOALS, trap
from .moves import Move
from .run import Search, Violation, begin
from .world import Broken, State

__all__ = ["NO_LIMITS", "Found", "Limits", "Progress", "Violation", "search"]


@frozen
class Limits:
    """Where a search stops without having seen everything; 0 for no limit.

    Attributes:
        states: States seen.
        seconds: Time spent, since it was begun or taken up.
        memory_mib: What the process has ever held, in MiB.
    """

    states: int = 0
    seconds: float = 0
    memory_mib: int = 0


NO_LIMITS = Limits()


@frozen
class Progress:
    """How far a search is.

    Attributes:
        seconds: Time spent, since it was begun or taken up.
        rate: States seen per second in that time.
    """

    states: int
    edges: int
    frontier: int
    depth: int
    seconds: float
    rate: float


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


def search(
    configuration: Configuration,
    *,
    limits: Limits = NO_LIMITS,
    progress: Callable[[Progress], None] | None = None,
    fingerprint: bool = False,
    checkpoint: Path | None = None,
    merge: bool = True,
) -> Found:
    """Search `configuration` until nothing is left, a property breaks, or a limit is reached.

    The search stops at the first violation, which is one of the shortest.

    Args:
        configuration: What to search.
        limits: Where to stop before.
        progress: Called every few thousand states.
        fingerprint: Make a digest of all states, if the search is complete.
        checkpoint: Take up the search that was put down there, if any; put it down there when a
            limit is reached, and remove it when nothing is left.
        merge: Look at one of all states that are renamings of each other; see `symmetry`.
    """
    started = time.monotonic()
    run = begin(configuration, merge=merge)
    if checkpoint is not None:
        take_up(run, checkpoint)
    stopped = _explore(run, started, limits, progress)
    if checkpoint is not None and stopped:
        put_down(run, checkpoint)
    complete = not run.frontier and not run.violations
    if checkpoint is not None and complete:
        checkpoint.unlink(missing_ok=True)
    if complete:
        run.violations += _waiting_for_ever(run)
    if run.graph is not None and complete and not run.violations:
        run.violations += _never_ending(run)
    return Found(
        configuration.name,
        len(run.states),
        run.edges,
        run.depth,
        complete,
        time.monotonic() - started,
        tuple(run.violations),
        frozenset(run.world.nodes.rows),
        run.world.fingerprint(run.states) if fingerprint and complete else 0,
    )


LOOK_EVERY = 2_000
"""States between two looks at the limits."""


def _explore(
    run: Search,
    started: float,
    limits: Limits,
    progress: Callable[[Progress], None] | None,
) -> bool:
    """Look at one state after another. Returns whether a limit was reached."""
    known = len(run.states)
    while run.looked < len(run.states):
        if not _look(run):
            return False
        run.looked += 1
        if run.looked == run.layer_end:
            run.layer_end = len(run.states)
            run.depth += 1
        if run.looked % LOOK_EVERY == 0:
            spent = time.monotonic() - started
            seen = len(run.states)
            if progress is not None:
                rate = (seen - known) / max(spent, 1e-9)
                progress(Progress(seen, run.edges, run.frontier, run.depth, spent, rate))
            if _enough(limits, seen, spent):
                return True
    return False


def _enough(limits: Limits, states: int, seconds: float) -> bool:
    return bool(
        (limits.states and states > limits.states)
        or (limits.seconds and seconds > limits.seconds)
        or (limits.memory_mib and _held_mib() > limits.memory_mib)
    )


def _held_mib() -> int:
    """The most memory this process has held, in MiB."""
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit


def _look(run: Search) -> bool:
    """All that may follow the next state. Returns whether nothing is broken."""
    index, states, world, graph, mine = run.index, run.states, run.world, run.graph, run.looked
    for move, after, broken in world.successors(states[mine]):
        run.edges += 1
        if broken:
            run.violations.append(_violation(run, mine, broken))
            return False
        number = index.get(after)
        if number is None and world.renamings:
            after = world.canonical(after)  # noqa: PLW2901
            number = index.get(after)
        if number is None:
            number = index[after] = len(states)
            states.append(after)
            run.parents.append(mine)
        if graph is not None:
            graph.add(mine, move, number)
    return True


def _violation(run: Search, at: int, broken: Broken) -> Violation:
    """What a move breaks in the state of number `at`, and the way there."""
    path, moves = _way(run, at)
    wanted = [name for name, _ in broken]
    move, found = next(
        (move, found)
        for move, _, found in run.world.successors(path[-1])
        if [name for name, _ in found] == wanted
    )
    return Violation(found, path, (*moves, move))


def _way(run: Search, at: int) -> tuple[tuple[State, ...], tuple[Move, ...]]:
    """States and moves from the initial state to that of number `at`, or to a renaming of it.

    The numbers are those of states that stand for others; the way goes through those others.
    """
    world, (first, *others) = run.world, run.path(at)
    path, moves = [first], []
    for wanted in others:
        move, after = next(
            (move, after)
            for move, after, _ in world.successors(path[-1])
            if world.canonical(after) == wanted
        )
        path.append(after)
        moves.append(move)
    return tuple(path), tuple(moves)


def _waiting_for_ever(run: Search) -> list[Violation]:
    """Where a process cannot get out by itself of what it is in."""
    world = run.world
    first: dict[Place, int] = {}
    for number, state in enumerate(run.states):
        for at in range(world.pair_at):
            first.setdefault((at, state[at]), number)
    place = without_end(world, first)
    if place is None:
        return []
    path, moves = _way(run, first[place])
    there = without_end(world, [(at, path[-1][at]) for at in range(world.pair_at)])
    assert there is not None, "whoever is renamed waits as long"
    return [Violation((("I7", waits_for_ever(world, there)),), path, moves)]


def _never_ending(run: Search) -> list[Violation]:
    """Where what must come about may stay away for ever, although nobody is kept from anything."""
    assert run.graph is not None, "only a search with a graph is asked"
    world = run.world
    wanted = GOALS[world.configuration.eventually]
    open_ended = {number for number, state in enumerate(run.states) if not wanted(world, state)}
    stuck = trap(run.graph, open_ended)
    if stuck is None:
        return []
    return [Violation((("ends", stuck.why),), *_way(run, stuck.state))]

"""The end of a run: no fault strikes any more, and everybody gets a turn.

One fair way on, and a short one: what has waited longest for its turn is done next, whoever would
lose patience may, and it goes on until everything is given back. A search of everything that can
follow is `liveness`'s; this is for worlds that are too large for it.
"""

from __future__ import annotations

from attrs import evolve, frozen

from .liveness import GOALS
from .moves import Move
from .world import Broken, State, World

__all__ = ["Calm", "calmed", "peace"]

STEPS_MOST = 2_000
FREE = ("impatience", "resend", "refusal")
ENGINES = ("offer", "readmit", "arrive", "compute", "resume")


@frozen
class Calm:
    """What peace came to.

    Attributes:
        path: The states on the way; the first is where it began, the last where nothing is left.
        moves: One for each state but the last.
        broken: What broke on the way, or `ends` where something is left after many turns.
    """

    path: tuple[State, ...]
    moves: tuple[Move, ...]
    broken: Broken


def calmed(world: World) -> World:
    """The same world without budgets: no fault strikes, and everybody may lose patience."""
    return World(evolve(world.configuration, budgets=(), free=FREE))


def moved(state: State, world: World, calm: World) -> State:
    """A state of `world` in `calm`, which numbers its parts otherwise."""
    nodes, pairs, hands, memories, _ = world.parts()
    there = calm.parts()
    columns = [(nodes, there[0])] * len(world.slots) + [(pairs, there[1])] * len(world.pairs)
    columns += [(hands, there[2])]
    columns += [(memories, there[3])] * len(world.configuration.consumers)
    found = [new.number(old[number]) for number, (old, new) in zip(state, columns, strict=False)]
    return (*found, calm.budget_parts.number(()))


def peace(world: World, state: State, calm: World) -> Calm:
    """What becomes of `state` in the calm world when everybody gets a turn."""
    state = moved(state, world, calm)
    path, moves = [state], list[Move]()
    turns: dict[tuple[object, ...], int] = {}
    for turn in range(STEPS_MOST):
        following = calm.successors(state)
        idle = not any(move.kind in ENGINES for move, _, _ in following)
        if idle and GOALS["ends"](calm, state):
            return Calm(tuple(path), tuple(moves), ())
        if not following:
            return Calm(tuple(path), tuple(moves), (("ends", "nothing is possible any more"),))
        move, after, broken = min(following, key=lambda each: turns.get(_whose(each[0]), -1))
        turns[_whose(move)] = turn
        moves.append(move)
        path.append(after)
        state = after
        if broken:
            return Calm(tuple(path), tuple(moves), broken)
    return Calm(tuple(path), tuple(moves), (("ends", f"something is left after {turn + 1} turns"),))


def _whose(move: Move) -> tuple[object, ...]:
    number = 0 if move.kind in ("post", "refuse", "write", "fire") else move.number
    return (move.kind, move.at, number, move.name)

"""A search at rest, in a file: put down when a limit is reached, and taken up where it stopped."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Hashable
from itertools import chain
from pathlib import Path

from attrs import frozen

from pushkv.core.errors import ConfigurationError

from .configurations import Configuration
from .liveness import Graph
from .run import Search
from .world import State

__all__ = ["put_down", "take_up"]


@frozen
class _Checkpoint:
    """A search at rest. Parts of the world are kept by number, as in the states.

    Attributes:
        states: All states in the order of their numbers, one after the other.
    """

    configuration: Configuration
    parts: tuple[tuple[Hashable, ...], ...]
    states: array[int]
    parents: array[int]
    looked: int
    layer_end: int
    depth: int
    edges: int
    rows: frozenset[tuple[str, str]]
    graph: Graph | None


def put_down(run: Search, path: Path) -> None:
    """Write a search to `path`, whole or not at all."""
    rest = _Checkpoint(
        run.world.configuration,
        tuple(tuple(parts) for parts in run.world.parts()),
        array("I", chain.from_iterable(run.states)),
        run.parents,
        run.looked,
        run.layer_end,
        run.depth,
        run.edges,
        frozenset(run.world.nodes.rows),
        run.graph,
    )
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        pickle.dump(rest, file, pickle.HIGHEST_PROTOCOL)
    draft.replace(path)


def take_up(run: Search, path: Path) -> None:
    """Go on from the search at `path` in a new one, if there is one.

    The file is a pickle: only one's own may be read.

    Raises:
        ConfigurationError: It is a search of something else.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        rest = pickle.load(file)  # noqa: S301 - one's own, as the docstring says
    wanted = run.world.configuration
    if not isinstance(rest, _Checkpoint) or rest.configuration != wanted:
        raise ConfigurationError("checkpoint", str(path), f"a search of {wanted.name}")
    run.world.nodes.rows.update(rest.rows)
    for parts, values in zip(run.world.parts(), rest.parts, strict=True):
        parts.refill(values)
    run.states = _states(rest.states, len(run.states[0]))
    run.index = {state: number for number, state in enumerate(run.states)}
    run.parents, run.graph = rest.parents, rest.graph
    run.looked, run.layer_end = rest.looked, rest.layer_end
    run.depth, run.edges = rest.depth, rest.edges


def _states(numbers: array[int], width: int) -> list[State]:
    """The states that were written one after the other; equal numbers are one object."""
    one = list(range(max(numbers) + 1))
    each = iter(map(one.__getitem__, numbers))
    return list(zip(*[each] * width, strict=True))

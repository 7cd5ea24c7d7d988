"""Merging states that differ in names loses nothing: on whole graphs, with rules and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve

from pushkv.check import snapshot
from pushkv.check.bounds import STILL, STRONG_UNBOUNDED, Configuration, Transfer, budgets_of
from pushkv.check.configurations import by_name
from pushkv.check.mutants import mutants
from pushkv.check.run import begin
from pushkv.check.search import Found, Violation, search
from pushkv.check.story import story
from pushkv.check.symmetry import names
from pushkv.check.world import Broken, State, World

A, B, C = (Transfer(name) for name in "abc")
SMALL = (
    Configuration(
        "transfers",
        "two transfers want the same block, one after the other",
        transfers=(A, B),
        budgets=budgets_of(cancel=1),
        connections=1,
        rates=STILL,
    ),
    Configuration(
        "three",
        "three transfers want two blocks",
        transfers=(evolve(A, start=1), evolve(B, start=1), evolve(C, start=1)),
        connections=1,
        rates=STILL,
        prelude=(("arrive", 1),) * 3,
    ),
    Configuration(
        "decoders",
        "two decoders want the same transfer",
        consumers=(("d", 0), ("e", 0)),
        transfers=(Transfer(consumers=("d", "e")),),
        connections=1,
        rates=STILL,
        prelude=(("arrive", 2),),
    ),
    Configuration(
        "prefills",
        "two producers, each with a transfer, want to write into the same block",
        producers=(("p", 0), ("q", 0)),
        transfers=(A, evolve(B, producer="q")),
        budgets=budgets_of(write_failure=1),
        connections=1,
        rates=STILL,
        prelude=(("arrive", 1), ("arrive", 2)),
    ),
    Configuration(
        "proofs",
        "a writer dies, and its death is proven to both transfers",
        transfers=(A, B),
        capabilities=STRONG_UNBOUNDED,
        budgets=budgets_of(crash_producer=1),
        connections=1,
        rates=STILL,
        proofs=True,
    ),
)
NAMED = {each.name: each for each in SMALL}


def whole(configuration: Configuration) -> tuple[World, dict[State, int]]:
    run = begin(configuration)
    world, seen = run.world, dict(run.index)
    for state in (todo := list(seen)):
        for _, after, _ in world.successors(state):
            if after not in seen:
                seen[after] = len(seen)
                todo.append(after)
    return world, seen


@pytest.mark.parametrize("name", NAMED)
def test_whoever_is_renamed_may_do_the_same(name: str) -> None:
    """In every state that can be reached: the same moves, with the renamed results."""
    world, seen = whole(NAMED[name])
    assert world.renamings
    for state in seen:
        for renamed in world.renamings:
            other = renamed(state)
            assert other in seen
            here = [(renamed(after), broken) for _, after, broken in world.successors(state)]
            there = [(after, broken) for _, after, broken in world.successors(other)]
            assert sorted(here) == sorted(there)


@pytest.mark.parametrize("name", NAMED)
def test_one_of_all_renamings_is_looked_at(name: str) -> None:
    world, seen = whole(NAMED[name])
    merged = search(NAMED[name], fingerprint=True)
    apart = search(NAMED[name], merge=False)
    assert apart.states == len(seen)
    assert merged.states == len({world.canonical(state) for state in seen}) < 0.6 * apart.states
    assert merged.complete
    assert apart.complete
    assert (merged.depth, merged.rows) == (apart.depth, apart.rows)
    assert merged.edges < 0.6 * apart.edges


def shortest(found: Found) -> tuple[str, int]:
    (violation,) = found.violations
    return violation.broken[0][0], len(violation.moves)


def replayed(configuration: Configuration, violation: Violation) -> None:
    """The story is a way that can be gone, move by move, without anything merged."""
    world = World(configuration)
    state: State = world.initial()
    found: Broken = ()
    for move in violation.moves:
        assert not found
        _, state, found = next(each for each in world.successors(state) if each[0] == move)
    assert found == violation.broken
    assert story(configuration, violation)


@pytest.mark.parametrize("stands", [min, max])
@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        ("cancel frees", "transfers"),
        ("verdict before the handles close", "transfers"),
        ("link end frees", "proofs"),
        ("no permit", "proofs"),
        ("exposure is not counted", "decoders"),
        ("exposure is not counted", "prefills"),
    ],
)
def test_what_breaks_breaks_as_soon(
    mutant: str,
    name: str,
    stands: Callable[[tuple[State, ...]], State],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a rule taken out: the same property, after as many moves, whoever stands for others."""

    def canonical(world: World, state: State) -> State:
        return stands((state, *(renamed(state) for renamed in world.renamings)))

    monkeypatch.setattr(World, "canonical", canonical)
    with mutants()[mutant].in_force():
        merged, apart = search(NAMED[name]), search(NAMED[name], merge=False)
        assert [shortest(merged)] == [shortest(apart)]
        replayed(NAMED[name], merged.violations[0])
    assert merged.states <= apart.states


def test_whatever_row_is_dropped_the_verdict_is_the_same() -> None:
    configuration = NAMED["transfers"]
    dropped = [each for each in mutants().values() if each.name.startswith("dropped: producer")]
    broken = 0
    for mutant in dropped[::12]:
        with mutant.in_force():
            merged, apart = search(configuration), search(configuration, merge=False)
        verdicts = [[each.broken[0][0] for each in found.violations] for found in (merged, apart)]
        assert verdicts[0] == verdicts[1], mutant.name
        assert merged.rows == apart.rows or verdicts[0], mutant.name
        broken += bool(verdicts[0])
    assert broken < len(dropped[::12])


def test_who_may_be_renamed() -> None:
    assert len(names(NAMED["three"])) == 5
    swapped = {"a": "b", "b": "a"}
    assert [each.transfers for each in names(NAMED["prefills"])] == [swapped]
    assert [each.engines for each in names(NAMED["prefills"])] == [{"d": "d", "p": "q", "q": "p"}]
    assert names(by_name("delivers")) == ()
    assert names(by_name("two-writers")) == ()
    different = evolve(NAMED["transfers"], transfers=(A, evolve(B, offers=2)))
    assert names(different) == ()


def test_whoever_is_ahead_is_not_merged_with_who_is_not() -> None:
    """A prelude that has made a difference has made it for good."""
    assert names(by_name("two-transfers"))
    assert begin(by_name("two-transfers")).world.renamings == ()


def test_nothing_is_merged_where_something_must_come_about() -> None:
    wanted = evolve(NAMED["transfers"], eventually="ends")
    assert begin(wanted).world.renamings == ()
    assert begin(NAMED["transfers"]).world.renamings


def test_the_order_of_what_is_looked_up_by_name_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All graphs are the same with everything that is kept in order of names kept backwards."""
    before = {each.name: search(each, merge=False) for each in SMALL}

    def backwards(items: tuple[tuple[object, object], ...]) -> tuple[tuple[object, object], ...]:
        return tuple(sorted(items, key=lambda item: repr(item[0]), reverse=True))

    monkeypatch.setattr(snapshot, "_named", backwards)
    for each in SMALL:
        after = search(each, merge=False)
        assert (after.states, after.edges, after.depth, after.rows) == (
            before[each.name].states,
            before[each.name].edges,
            before[each.name].depth,
            before[each.name].rows,
        )

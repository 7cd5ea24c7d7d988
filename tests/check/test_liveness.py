"""Traps: where the goal may stay away for ever, on graphs small enough to see."""

from __future__ import annotations

import pytest

from pushkv.check.configurations import by_name
from pushkv.check.liveness import Graph, trap
from pushkv.check.moves import Move
from pushkv.check.patch import Patch, swap
from pushkv.check.runner import check_one
from pushkv.core.consumer import QUARANTINED
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.events import Tick

STEP, OTHER = Move("time"), Move("serve")
FAULT = Move("lose", cost="lose")


def graph(*edges: tuple[int, Move, int]) -> Graph:
    made = Graph()
    for source, move, target in sorted(edges, key=lambda edge: edge[0]):
        made.add(source, move, target)
    return made


def test_whoever_stops_before_the_goal_is_trapped() -> None:
    stuck = trap(graph((0, STEP, 1), (0, FAULT, 2)), {0, 1})
    assert stuck is not None
    assert stuck.state == 1


def test_a_fault_is_no_way_out() -> None:
    assert trap(graph((0, FAULT, 1)), {0}) is not None
    assert trap(graph((0, STEP, 1)), {0}) is None


def test_whoever_goes_round_for_ever_is_trapped() -> None:
    stuck = trap(graph((0, STEP, 1), (1, STEP, 0), (2, STEP, 0)), {0, 1, 2})
    assert stuck is not None
    assert stuck.state == 0


def test_nobody_goes_round_past_a_way_out_for_ever() -> None:
    """The other move is possible again and again, and so it is made."""
    assert trap(graph((0, STEP, 1), (1, STEP, 0), (1, OTHER, 2)), {0, 1}) is None


def test_a_way_out_that_is_also_a_way_round_is_none() -> None:
    stuck = trap(graph((0, STEP, 1), (1, STEP, 0), (1, OTHER, 2), (0, OTHER, 0)), {0, 1})
    assert stuck is not None


def test_a_part_that_cannot_be_left_is_found_inside_one_that_can() -> None:
    """Round 0-1-2 passes a way out at 2; round 0-1 alone does not."""
    found = trap(
        graph((0, STEP, 1), (1, STEP, 0), (1, STEP, 2), (2, STEP, 0), (2, OTHER, 3)), {0, 1, 2}
    )
    assert found is not None


def test_faults_are_never_owed() -> None:
    """A round on which a fault is possible, and never made, is a round all the same."""
    assert trap(graph((0, STEP, 1), (1, STEP, 0), (1, FAULT, 2)), {0, 1}) is not None


@pytest.mark.parametrize("name", ["delivers-in-time"])
def test_a_live_pair_delivers(name: str) -> None:
    assert check_one(by_name(name)).passed


def test_a_quarantine_that_never_ends_is_found() -> None:
    patch = Patch()
    swap(patch, CONSUMER, [QUARANTINED], Tick, None)
    try:
        report = check_one(by_name("ends"))
    finally:
        patch.undo()
    (told,) = report.violations
    assert told.broken[0][0] == "I7"
    assert "d waits for ever" in told.story

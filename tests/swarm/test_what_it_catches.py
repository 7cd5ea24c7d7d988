"""A rule that is taken out, or a report that gets lost, is missed within a few seeds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pushkv.check.known import rule_of
from pushkv.check.patch import Patch
from pushkv.check.taken_out import TAKEN_OUT
from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    Report,
    SourceReleased,
    SourceYielded,
)
from pushkv.core.ids import TransferId, Worker
from pushkv.runtime import Bridge
from pushkv.runtime.outbound import Outbound
from pushkv.testing.swarm import Backend, Kind, SwarmSettings, Violation, run_swarm
from pushkv.testing.swarm.swarm import _Swarm

SEEDS = 8
CAUGHT = {
    "cancel frees": ("R1", 1),
    "link end frees": ("R2", 1),
    "fence at the last grant": ("R6", 1),
    "verdict before the handles close": ("R8", 0),
    "any attempt will do": ("R9", 1),
    "done is taken for visible": ("R10", 3),
    "first rank frees": ("R12", 0),
    "first rank delivers": ("R12", 0),
    "an unknown write is over": ("R14", 0),
}
"""What is found quickly, from which seed on; `pushkv check` finds every rule's absence."""
CAUGHT_IN_STORMS = {
    "no permit": ("R3", 26),
    "permit from the grant": ("R4", 35),
    "write bound not counted": ("R5", 35),
    "nothing remembered": ("R7", 14),
    "new permit covers old registrations": ("R11", 1),
    "no restart grace": ("R13", 37),
}
"""What needs more bad luck at once, and the seed of a small storm that has it."""
YIELDS = SwarmSettings(2, 60, 6, Backend.ASYNCIO, Kind.STORM)
"""A small storm in which prefills are preempted while WRITEs read their blocks."""


@pytest.fixture
def patch() -> Iterator[Patch]:
    made = Patch()
    yield made
    made.undo()


def first_violation(first: int) -> Violation | None:
    for seed in range(first, first + SEEDS):
        found = run_swarm(SwarmSettings(seed, 120, 8)).violation
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("name", CAUGHT)
def test_a_rule_taken_out_is_missed(name: str, patch: Patch) -> None:
    rule, seed = CAUGHT[name]
    assert rule_of(name) == rule
    TAKEN_OUT[name](patch)
    found = first_violation(seed)
    assert found is not None
    assert found.invariant in ("I1", "I2", "I3", "no exception")


@pytest.mark.parametrize("name", CAUGHT_IN_STORMS)
def test_a_rule_taken_out_is_missed_in_a_storm(name: str, patch: Patch) -> None:
    rule, seed = CAUGHT_IN_STORMS[name]
    assert rule_of(name) == rule
    storm = SwarmSettings(seed, 60, 6, Backend.ASYNCIO, Kind.STORM)
    assert run_swarm(storm).violation is None
    TAKEN_OUT[name](patch)
    found = run_swarm(storm).violation
    assert found is not None
    assert found.invariant == "I1"


@pytest.mark.parametrize(
    ("kinds", "invariant", "said"),
    [
        (BlocksReleased, "I4", "never given back"),
        (Delivered | NotDelivered | BlocksReleased, "no wait without end", "outcome at ranks []"),
    ],
    ids=["release", "outcome"],
)
def test_a_report_that_gets_lost_is_missed(
    kinds: type[Report], invariant: str, said: str, patch: Patch
) -> None:
    report = Bridge.report

    def forgetful(self: Bridge, each: Report) -> None:
        if not (isinstance(each, kinds) and each.transfer.endswith("7")):
            report(self, each)

    patch.set(Bridge, "report", forgetful)
    found = run_swarm(SwarmSettings(4, 60, 6)).violation
    assert found is not None
    assert found.invariant == invariant
    assert said in found.detail


@pytest.mark.parametrize(
    ("kind", "times", "said"),
    [
        (SourceYielded, 0, "is idle and never yielded"),
        (SourceYielded, 2, "without a preemption"),
        (SourceReleased, 2, "a second time"),
    ],
    ids=["never yielded", "yielded twice", "released twice"],
)
def test_what_a_source_says_is_said_once(
    kind: type[Report], times: int, said: str, patch: Patch
) -> None:
    report = Bridge.report

    def repeating(self: Bridge, each: Report) -> None:
        for _ in range(times if isinstance(each, kind) else 1):
            report(self, each)

    patch.set(Bridge, "report", repeating)
    found = run_swarm(YIELDS).violation
    assert found is not None
    assert found.invariant == "I3"
    assert said in found.detail


def hasty(self: Outbound, transfer: TransferId) -> None:
    self._yielded.append(transfer)


def test_a_source_that_is_yielded_while_a_write_reads_it_is_missed(patch: Patch) -> None:
    patch.set(Outbound, "preempted", hasty)
    found = run_swarm(YIELDS).violation
    assert found is not None
    assert found.invariant == "I1"
    assert "while a WRITE reads it" in found.detail


def test_the_bytes_alone_show_that_a_source_was_yielded_early(patch: Patch) -> None:
    def unseen(self: _Swarm, writer: Worker, transfer: TransferId) -> int:
        return 0

    patch.set(Outbound, "preempted", hasty)
    patch.set(_Swarm, "open_writes", unseen)
    found = run_swarm(YIELDS).violation
    assert found is not None
    assert found.invariant == "I1"
    assert "was read from a source of others" in found.detail

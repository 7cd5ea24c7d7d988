"""Each known mistake breaks a property, or a scenario script; one is excluded by connections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pushkv.check.configurations import by_name
from pushkv.check.known import EXCLUDED, KNOWN, MISSED_IN, TOLD_BY
from pushkv.check.mutants import mutants
from pushkv.check.runner import Limits, check_one
from pushkv.check.script import HoldsError, without
from pushkv.check.scripts import find
from pushkv.check.taken_out import TAKEN_OUT
from pushkv.core.ids import Incarnation, seconds
from pushkv.core.messages import Grant
from pushkv.testing.scenario import run
from pushkv.testing.world import Node, ViolationError, pair

LIST = Path(__file__).parents[2] / "docs" / "mistakes.md"
BREAKS = {
    "the newest link has the fence": "I1",
    "one fence per engine": "links",
    "any grant will do": "I5",
    "a verdict frees without arrivals": "I1",
    "parts are forgotten when the link ends": "I1",
    "what was computed is kept when preempted": "I1",
    "a preempted source goes at once": "I1",
    "part numbers are used again": "I5",
    "what was ordered is kept for the next attempt": "ends",
    "abort without a drain": "I1",
    "failed parts are owed": "ends",
    "exposure is not counted": "I4",
    "the source is free when registered ranks are": "ends",
    "no producer rank": "I6",
    "no consumer rank": "I5",
    "a registration takes the place of one that drains": "I1",
    "attempts count from zero": "I2",
    "arrivals are void with their link": "ends",
    "a cancel is ignored before a retry": "I7",
    "a revoke is unanswered before the request comes": "I7",
    "a tombstone ends by time": "I1",
    "a tombstone until received where messages overtake": "I1",
    "a write is open only when posted": "I1",
    "a permit is checked when ordered": "I1",
    "waiting has no end": "I7",
    "a revoke is waited for without an end": "I7",
    "a write is waited for without an end": "I7",
    "late input is not counted": "I5",
    "a repeated registration is served again": "I5",
    "the reason is lost on the way": "I8",
    "siblings blame each other": "I8",
    "an expired source is told as any other": "I8",
    "a time out frees": "I1",
    "a new link frees": "I1",
    "a hold ends under a write": "I1",
    "what is in flight is forgotten with the link": "I1",
    "the first error closes the others": "I1",
    "what was given back is served again": "I1",
    "arrivals are counted": "I5",
    "a late success revives": "I3",
    "a failed write ends nothing": "ends",
    "a hold has no end": "I7",
    "a quarantine has no end": "I7",
    "whoever is unreachable is waited for": "I7",
    "late input raises": "no exception",
}
"""By mistake: the property that breaks in the configuration in which it is missed."""


@pytest.mark.parametrize("name", BREAKS)
def test_a_mistake_is_missed(name: str) -> None:
    configuration = MISSED_IN[name]
    with mutants()[name].in_force():
        report = check_one(by_name(configuration), Limits(states=100_000))
    (told,) = report.violations
    assert told.broken[0][0] == BREAKS[name], told.story
    assert told.story.startswith(f"{configuration}: ")


@pytest.mark.parametrize("name", ["a hold has no end", "whoever is unreachable is waited for"])
def test_a_wait_without_an_end_is_found_again_by_its_script(name: str) -> None:
    with mutants()[name].in_force():
        (told,) = check_one(by_name(MISSED_IN[name])).violations
    script = without(name, told.scenario)
    assert run(script) == script
    with pytest.raises(HoldsError, match="I7 is not broken"):
        run(script, as_it_is=True)


@pytest.mark.parametrize("name", TOLD_BY)
def test_a_script_comes_out_otherwise(name: str) -> None:
    script = find(TOLD_BY[name])
    assert not script.broken()
    with mutants()[name].in_force():
        assert script.broken()


def test_every_known_mistake_is_missed_told_or_excluded() -> None:
    assert set(BREAKS) == set(MISSED_IN) - set(TAKEN_OUT)
    assert set(MISSED_IN) | set(TOLD_BY) | set(EXCLUDED) == set(KNOWN)
    assert len(MISSED_IN) + len(TOLD_BY) + len(EXCLUDED) == len(KNOWN)


def test_the_list_says_of_every_mistake_what_misses_it() -> None:
    rows = re.findall(
        r"^\| .* \| (.+?) \| (.+?) \|$", LIST.read_text(encoding="utf-8"), re.MULTILINE
    )
    said = {name: by for name, by in rows if name in KNOWN}
    assert set(said) == set(KNOWN)
    for name, by in said.items():
        where = MISSED_IN.get(name) or TOLD_BY.get(name) or "excluded"
        assert where in by, f"{name}: {by}"


def test_a_grant_to_another_life_is_excluded_by_connections() -> None:
    chosen = by_name("producer-restart")
    before = check_one(chosen, fingerprint=True)
    with mutants()["a grant names no incarnation"].in_force():
        after = check_one(chosen, fingerprint=True)
    assert (after.fingerprint, after.edges) == (before.fingerprint, before.edges)


def stray_grant() -> Node:
    """The consumer has ended the link; a GRANT to a former life of the producer comes over it."""
    world, consumer, producer = pair(auto=False)
    world.request(producer, "a")
    world.offer(consumer, "a", [producer])
    world.settle()
    wire = world.wire(consumer, producer)
    world.part(consumer, producer)
    world.lose(wire, consumer)
    world.advance(seconds(2.5))
    (link,) = producer.endpoint.links.store.states.values()
    lease = producer.endpoint._machines.rules.policy.lease
    stray = Grant(link.stamps[-1], lease, Incarnation(consumer.incarnation), Incarnation(99))
    wire.queues[producer.name].clear()
    world.send(wire, producer, stray)
    world.deliver(wire, producer)
    world.advance(seconds(1))
    assert world.released(consumer, "a")
    world.compute(producer, "a")
    for write in world.ordered():
        world.finish(write)
    return producer


def test_a_grant_to_another_life_is_counted() -> None:
    assert stray_grant().counted["stale_grant"] == 1
    with mutants()["a grant names no incarnation"].in_force(), pytest.raises(ViolationError):
        stray_grant()

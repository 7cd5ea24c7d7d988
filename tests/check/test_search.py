"""The search itself: counts, determinism, limits, and what it takes an endpoint to be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

from pushkv.check import nodes
from pushkv.check.configurations import STANDARD, by_name
from pushkv.check.configurations_deep import DEEP
from pushkv.check.counts import read, rewritten
from pushkv.check.coverage import (
    IGNORED,
    TABLES,
    mislisted,
    rows_that_act,
    rows_that_fire,
    unreached,
)
from pushkv.check.handlers import HANDLERS
from pushkv.check.moves import KINDS
from pushkv.check.patch import Patch, swap
from pushkv.check.runner import Limits, check, check_one
from pushkv.check.search import Progress, search
from pushkv.check.snapshot import freeze, thaw
from pushkv.check.world import World
from pushkv.core.consumer import QUARANTINED
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.errors import ConfigurationError
from pushkv.core.events import Proven
from pushkv.core.link import LINK
from pushkv.core.producer_table import PRODUCER
from pushkv.core.request import REQUEST

ROOT = Path(__file__).parents[2]
QUICK = (
    "delivers-in-time",
    "suspected",
    "ends-relinked",
    "streaming-unknown",
    "asked-while-retrying",
    "asked-when-done",
    "arrives-again",
    "lying",
    "fences",
    "weak-parts",
    "weak-repeated",
    "overtaken",
    "delivers-retried",
    "delivers-again",
    "delivers-ranks",
    "frees-relinked",
    "delivers-weak",
    "ends-aborted",
    "weak-deaths",
    "unbounded-deaths",
    "streaming-faults",
    "nothing-to-send",
    "repeated",
    "streaming-lost",
    "streaming",
    "two-writers-lost",
    "two-transfers",
    "delivers",
    "producer-restart",
    "retry",
    "weak",
)
"""Configurations that take no more than a few seconds. Their counts are those of the page."""
PAGE = read((ROOT / "docs" / "checking.md").read_text())


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_configuration_is_exhausted(name: str) -> None:
    report = check_one(by_name(name))
    assert [told.story for told in report.violations] == []
    assert report.complete
    assert (report.states, report.edges) == PAGE[name]
    assert {name for _, name in report.rows} <= rows_that_fire()


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_hash_seed_changes_nothing(seed: str) -> None:
    name = "streaming"
    code = (
        "from pushkv.check.runner import check_one\n"
        "from pushkv.check.configurations import by_name\n"
        f"found = check_one(by_name({name!r}))\n"
        "print(found.states, found.edges, found.depth, sorted(found.rows))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    here = check_one(by_name(name))
    assert ran.stdout == f"{here.states} {here.edges} {here.depth} {sorted(here.rows)}\n"


def test_the_tables_that_run_are_searched() -> None:
    assert TABLES == (CONSUMER, REQUEST, PRODUCER, LINK)
    world = World(by_name("cancel"))
    world.initial()
    endpoint = world.nodes._endpoints[world.slots[0], 1]
    assert endpoint.receiving.consumers.table is CONSUMER
    assert endpoint.receiving.requests.table is REQUEST
    assert endpoint.sending.producers.table is PRODUCER
    assert endpoint.links.store.table is LINK


def test_a_copy_of_a_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "LINK", CONSUMER)
    with pytest.raises(AssertionError, match="no copies"):
        World(by_name("cancel")).initial()


def test_every_move_has_a_handler() -> None:
    assert set(HANDLERS) == set(KINDS)
    assert len(KINDS) == len(set(KINDS))


def test_an_endpoint_is_the_same_after_a_rest() -> None:
    """What is thawed and frozen again, everywhere in a search, is what it was."""
    configuration = by_name("two-readers")
    world = World(configuration)
    seen = {world.initial()}
    layer = list(seen)
    while layer and len(seen) < 3_000:
        layer = [after for state in layer for _, after, _ in world.successors(state)]
        layer = list(dict.fromkeys(state for state in layer if state not in seen))
        seen.update(layer)
    looked = 0
    for at, slot in enumerate(world.slots):
        for number in {state[at] for state in seen}:
            node = world.node_parts[number]
            if not node.life:
                continue
            endpoint = world.nodes._endpoints[slot, node.life]
            thaw(node.endpoint, endpoint)
            again = freeze(endpoint, configuration.policy.lease, walked=configuration.proofs)
            assert again == node.endpoint
            looked += 1
    assert looked > 100


def test_a_limit_that_is_reached_is_no_success() -> None:
    report = check_one(by_name("cancel"), Limits(states=2_000))
    assert not report.complete
    assert not report.passed
    assert not report.violations


def test_progress_is_told() -> None:
    heard: list[Progress] = []
    found = search(by_name("retry"), progress=heard.append)
    assert found.complete
    assert len(heard) > 3
    assert [each.states for each in heard] == sorted(each.states for each in heard)
    assert heard[-1].states <= found.states
    assert heard[-1].frontier > 0
    assert heard[-1].rate == pytest.approx((heard[-1].states - 1) / heard[-1].seconds)


def test_several_at_once_come_to_the_same() -> None:
    chosen = [by_name("nothing-to-send"), by_name("two-writers-lost")]
    done: list[str] = []
    reports = check(chosen, jobs=2, done=lambda report: done.append(report.name))
    assert sorted(done) == sorted(each.name for each in chosen)
    alone = [check_one(each) for each in chosen]
    assert [evolve(each, seconds=0) for each in reports] == [
        evolve(each, seconds=0) for each in alone
    ]


def test_rows_that_nothing_reached_are_named() -> None:
    missing = unreached([check_one(by_name("nothing-to-send"))])
    assert "consumer.settling/ArrivalSeen" in missing[CONSUMER.name]
    assert "consumer.registering/LinkUp" not in missing[CONSUMER.name]
    assert set(missing[CONSUMER.name]) < set(rows_that_act(CONSUMER))


def test_rows_that_ignore_and_yet_fire_are_listed() -> None:
    kinds = {row.name: row.kind for table in TABLES for row in table.rows.values()}
    assert {kinds[name] for name in IGNORED} == {"ignore"}
    report = check_one(by_name("unbounded-deaths"))
    fired = {name for _, name in report.rows}
    assert fired <= rows_that_fire()
    assert fired & IGNORED
    assert set(mislisted([report])) == IGNORED - fired
    unheard_of = evolve(report, rows=report.rows | {("producer", "producer.done/Tick")})
    assert "producer.done/Tick" in mislisted([unheard_of])


def test_the_page_has_all_counts_and_no_others() -> None:
    assert list(PAGE) == [each.name for each in STANDARD]
    page = (ROOT / "docs" / "checking.md").read_text()
    assert rewritten(page, PAGE) == page
    changed = rewritten(page, {**PAGE, "retry": (1, 2)})
    assert read(changed) == {**PAGE, "retry": (1, 2)}


def test_configurations_have_one_name_each() -> None:
    names = [each.name for each in (*STANDARD, *DEEP)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["streaming", "ends-aborted"])
def test_a_search_that_was_put_down_is_taken_up(name: str, tmp_path: Path) -> None:
    configuration = by_name(name)
    path = tmp_path / "search"
    at_once = check_one(configuration, fingerprint=True)
    seen = 0
    for limit in (3_000, 7_000):
        rest = search(configuration, limits=Limits(states=limit), checkpoint=path)
        assert not rest.complete
        assert path.exists()
        assert rest.states > seen
        seen = rest.states
    last = search(configuration, checkpoint=path, fingerprint=True)
    assert not path.exists()
    assert last.complete
    assert (last.states, last.edges, last.depth, last.rows, last.fingerprint) == (
        at_once.states,
        at_once.edges,
        at_once.depth,
        at_once.rows,
        at_once.fingerprint,
    )


def test_what_may_stay_away_for_ever_is_found_after_a_rest(tmp_path: Path) -> None:
    """The edges seen before the rest count as well."""
    configuration, path = by_name("ends-aborted"), tmp_path / "search"
    patch = Patch()
    swap(patch, CONSUMER, [QUARANTINED], Proven, None)
    try:
        at_once = search(configuration)
        assert not search(configuration, limits=Limits(states=4_000), checkpoint=path).violations
        rested = search(configuration, checkpoint=path)
    finally:
        patch.undo()
    assert [each.broken for each in rested.violations] == [
        each.broken for each in at_once.violations
    ]
    assert [each.moves for each in rested.violations] == [each.moves for each in at_once.violations]
    assert rested.violations[0].broken[0][0] == "ends"


def test_a_search_stops_when_it_holds_too_much() -> None:
    stopped = search(by_name("retry"), limits=Limits(memory_mib=1))
    assert not stopped.complete
    assert stopped.states < 10_000
    assert search(by_name("nothing-to-send"), limits=Limits(memory_mib=1 << 20)).complete


def test_a_search_of_something_else_is_not_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "search"
    search(by_name("cancel"), limits=Limits(states=1_000), checkpoint=path)
    with pytest.raises(ConfigurationError, match="retry"):
        search(by_name("retry"), checkpoint=path)

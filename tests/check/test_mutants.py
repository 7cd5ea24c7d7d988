"""Each rule, taken out, breaks a property in a standard configuration; nothing stays out."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Any

import pytest
from attrs import evolve

from pushkv.check.configurations import STANDARD, by_name
from pushkv.check.coverage import TABLES, rows_that_act
from pushkv.check.fences import fences_of
from pushkv.check.known import MISSED_IN
from pushkv.check.mutants import mutants, of_rows, of_rules
from pushkv.check.runner import Limits, check_one
from pushkv.check.script import HoldsError, ImpossibleError, without
from pushkv.check.scripts import find, scripts
from pushkv.check.taken_out import TAKEN_OUT
from pushkv.check.trials import Baseline, Fate, searched, try_one
from pushkv.core import rules
from pushkv.core.consumer import ConsumerStatus
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.events import Doubted, Proven, Tick, WriteDone
from pushkv.core.link import LINK, LinkStatus
from pushkv.core.producer import ProducerStatus
from pushkv.core.producer_table import PRODUCER
from pushkv.core.table import Table
from pushkv.testing.scenario import run

BREAKS = {
    "cancel frees": "I1",
    "link end frees": "I1",
    "no permit": "I1",
    "permit without drift": "I1",
    "permit from the grant": "I1",
    "write bound not counted": "I1",
    "fence at the last grant": "I1",
    "grant on an ended link": "I1",
    "nothing remembered": "I5",
    "verdict before the handles close": "I1",
    "any attempt will do": "I2",
    "done is taken for visible": "I2",
    "new permit covers old registrations": "I1",
    "first rank frees": "I3",
    "first rank delivers": "I2",
    "no restart grace": "I1",
    "a new incarnation proves death": "I1",
    "an unknown write is over": "I1",
    "settling by the own clock alone": "I1",
    "coverage unchecked": "I2",
}
"""By mutant: the property that breaks in the configuration in which it is missed."""


@pytest.mark.parametrize("name", BREAKS)
def test_a_rule_is_missed(name: str) -> None:
    mutant = mutants()[name]
    configuration, broken = MISSED_IN[name], BREAKS[name]
    with mutant.in_force():
        report = check_one(by_name(configuration), Limits(states=400_000))
    (told,) = report.violations
    assert told.broken[0][0] == broken, told.story
    assert told.story.startswith(f"{configuration}: ")
    assert told.story.count("\n") > len(told.moves)
    assert told.mermaid.startswith("sequenceDiagram\n")
    script = without(name, told.scenario)
    assert script.endswith(f"\nexpect broken {broken}\n")
    assert run(script) == script
    with pytest.raises((HoldsError, ImpossibleError)):
        run(script, as_it_is=True)


def test_every_rule_is_among_them() -> None:
    assert {f"R{number}" for number in range(1, 15)} <= {each.rule for each in of_rules()}
    known = mutants()
    assert {f"R{number}" for number in range(1, 15)} == {known[name].rule for name in BREAKS}


def test_every_acting_row_is_dropped_retargeted_and_unfenced() -> None:
    rows = sum(len(rows_that_act(table)) for table in TABLES)
    names = [each.name for each in of_rows()]
    assert len(names) == len(set(names))
    kinds = Counter(name.split(":")[0] for name in names)
    assert kinds["dropped"] == kinds["retargeted"] == rows
    assert kinds["unfenced"] > 100


def unfenced(table: Table[Any], status: StrEnum, event: type) -> list[str]:
    return [each.what for each in fences_of(table, table.rows[status, event])]


def test_fences_are_found_within_actions_and_around_them() -> None:
    assert unfenced(CONSUMER, ConsumerStatus.SETTLING, Tick) == ["now < state.deadline_at"]
    assert unfenced(CONSUMER, ConsumerStatus.QUARANTINED, Tick) == [
        "rule.fence_passed(now, state.fence, rules.capabilities.write_bound)",
        "now >= state.deadline_at",
    ]
    assert unfenced(PRODUCER, ProducerStatus.WRITING, WriteDone) == ["of another attempt"]
    assert unfenced(PRODUCER, ProducerStatus.RETRYING, Tick) == [
        "now >= state.transfer_until",
        "now >= state.timer_at",
    ]
    assert unfenced(LINK, LinkStatus.UP, Doubted) == []


def test_what_cannot_matter_in_a_row_is_no_fence_of_it() -> None:
    """The same action asks for the status and the event, which the row knows."""
    assert unfenced(PRODUCER, ProducerStatus.WRITING, Tick) == ["now >= state.transfer_until"]
    assert unfenced(CONSUMER, ConsumerStatus.QUARANTINED, Proven) == ["of another transfer"]


def test_nothing_stays_taken_out() -> None:
    before = [dict(table.rows) for table in TABLES], vars(rules).copy()
    for mutant in mutants().values():
        with mutant.in_force():
            pass
    assert before == ([dict(table.rows) for table in TABLES], vars(rules).copy())


def fate_of(name: str, configuration: str) -> Fate:
    chosen = by_name(configuration)
    return try_one(mutants()[name], Baseline((), (searched(chosen),)))


def test_a_row_that_matters_is_killed() -> None:
    killed = fate_of("dropped: consumer.registering/LinkUp", "nothing-to-send")
    assert killed.where == "nothing-to-send"
    assert killed.by.startswith("sometimes ")
    assert not killed.survives


def test_a_row_that_changes_nothing_within_the_bounds_is_equivalent() -> None:
    """It only renews somebody's patience, which may end at any moment all the same."""
    same = fate_of("dropped: consumer.registered/Registered", "repeated")
    assert same.equivalent
    assert not same.survives


def test_a_row_that_is_never_reached_survives() -> None:
    assert fate_of("dropped: consumer.settling/ArrivalSeen", "nothing-to-send").survives


def test_a_script_kills_what_changes_its_story() -> None:
    script = find("b36_consumed_after_it_expired")
    baseline = Baseline((script,), ())
    killed = try_one(mutants()["dropped: producer.holding/Tick"], baseline)
    assert (killed.where, killed.by) == (script.name, "scenario")
    assert "expired" in killed.story
    assert try_one(mutants()["dropped: producer.draining/Tick"], baseline).survives


def test_a_script_without_end_is_stopped() -> None:
    script = evolve(find("b36_consumed_after_it_expired"), steps=-49)
    assert "there is no end to its steps" in script.broken()


def test_scripts_are_tried_the_shortest_first() -> None:
    found = scripts()
    assert len(found) > 40
    assert [each.steps for each in found] == sorted(each.steps for each in found)
    assert all(not each.broken() for each in found[:5])


def test_configurations_that_are_named_exist() -> None:
    assert set(MISSED_IN.values()) <= {each.name for each in STANDARD}
    assert set(BREAKS) == set(TAKEN_OUT) <= {each.name for each in of_rules()}

"""Each rule, taken out, breaks a property in a standard configuration; nothing stays out."""

from __future__ import annotations

import pytest

from pushkv.check.configurations import STANDARD, by_name
from pushkv.check.coverage import TABLES, rows_that_act
from pushkv.check.mutants import Fate, mutants, of_rows, of_rules, try_one
from pushkv.check.runner import Limits, check_one
from pushkv.check.taken_out import MISSED_IN
from pushkv.core import rules

BREAKS = {
    "cancel frees": "I1",
    "link end frees": "I1",
    "no permit": "I1",
    "permit without drift": "I1",
    "permit from the grant": "I1",
    "write bound not counted": "I1",
    "fence at the last grant": "I1",
    "grant on an ended link": "I1",
    "nothing remembered": "I1",
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


def test_every_rule_is_among_them() -> None:
    assert {f"R{number}" for number in range(1, 15)} <= {each.rule for each in of_rules()}
    known = mutants()
    assert {f"R{number}" for number in range(1, 15)} == {known[name].rule for name in BREAKS}


def test_every_acting_row_is_dropped_and_retargeted() -> None:
    rows = sum(len(rows_that_act(table)) for table in TABLES)
    names = [each.name for each in of_rows()]
    assert len(names) == 2 * rows == len(set(names))


def test_nothing_stays_taken_out() -> None:
    before = [dict(table.rows) for table in TABLES], vars(rules).copy()
    for mutant in mutants().values():
        with mutant.in_force():
            pass
    assert before == ([dict(table.rows) for table in TABLES], vars(rules).copy())


def fate_of(name: str, configuration: str) -> Fate:
    chosen = by_name(configuration)
    return try_one(mutants()[name], [(chosen, check_one(chosen, fingerprint=True))])


def test_a_row_that_matters_is_killed() -> None:
    killed = fate_of("dropped: consumer.registering/LinkUp", "nothing-to-send")
    assert killed.configuration == "nothing-to-send"
    assert killed.by.startswith("sometimes ")
    assert not killed.survives


def test_a_row_that_changes_nothing_within_the_bounds_is_equivalent() -> None:
    """It only renews somebody's patience, which may end at any moment all the same."""
    same = fate_of("dropped: consumer.registered/Registered", "repeated")
    assert same.equivalent
    assert not same.survives


def test_a_row_that_is_never_reached_survives() -> None:
    assert fate_of("dropped: consumer.settling/ArrivalSeen", "nothing-to-send").survives


def test_configurations_that_are_named_exist() -> None:
    assert set(MISSED_IN.values()) <= {each.name for each in STANDARD}
    assert set(MISSED_IN) == set(BREAKS) <= {each.name for each in of_rules()}

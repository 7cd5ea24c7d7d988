"""Rules are missed between ranks and between producers, too."""

from __future__ import annotations

import pytest

from pushkv.check.configurations import by_name
from pushkv.check.mutants import mutants
from pushkv.check.runner import Limits, check_one

MISSED = (
    ("link end frees", "writers-in-time", "I1"),
    ("link end frees", "readers-in-time", "I1"),
    ("first rank frees", "writers-in-time", "I1"),
    ("cancel frees", "rerouted", "I1"),
    ("verdict before the handles close", "rerouted", "I1"),
    ("link end frees", "rerouted-lost", "I1"),
    ("fence at the last grant", "rerouted-lost", "I1"),
    ("link end frees", "rerouted-alone", "I1"),
)


@pytest.mark.parametrize(("mutant", "name", "broken"), MISSED)
def test_a_rule_is_missed(mutant: str, name: str, broken: str) -> None:
    """Without it the first producer's late WRITE lands in what is somebody else's by then."""
    with mutants()[mutant].in_force():
        report = check_one(by_name(name), Limits(states=60_000))
    (told,) = report.violations
    assert told.broken[0][0] == broken

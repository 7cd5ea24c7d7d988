"""The whole standard set, to the last state: what everything that is said of it rests on."""

from __future__ import annotations

from pathlib import Path

import pytest

from pushkv.check.configurations import STANDARD
from pushkv.check.counts import read
from pushkv.check.coverage import mislisted, unreached
from pushkv.check.runner import check

PAGE = Path(__file__).parents[2] / "docs" / "checking.md"


@pytest.mark.timeout(1_200)
def test_the_standard_set_is_exhausted_and_nothing_breaks() -> None:
    largest_first = sorted(STANDARD, key=lambda each: -read(PAGE.read_text())[each.name][0])
    reports = check(largest_first, jobs=2)
    assert [told.story for report in reports for told in report.violations] == []
    assert [report.name for report in reports if not report.complete] == []
    assert {report.name: (report.states, report.edges) for report in reports} == read(
        PAGE.read_text()
    )
    assert not any(unreached(reports).values())
    assert mislisted(reports) == ()

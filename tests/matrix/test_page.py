"""The page says what the kept rows come to."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from tests.matrix.page import filled, reference_table, vllm_table
from tests.matrix.rows import Row, Rows

ROOT = Path(__file__).parents[2]
ROW = Row("f", "reference, tcp", runs=20, clients=40, answered=40, right=40, recovered=20)


def test_the_page_agrees_with_the_rows_that_are_kept_beside_it() -> None:
    page = (ROOT / "docs/faults.md").read_text()
    rows = [*Rows(ROOT / "docs/faults.json").rows.values()]
    assert filled(page, rows) == page, "python -m tests.matrix.page"


def test_lanes_are_added_up_and_their_runs_are_told_apart() -> None:
    other = evolve(ROW, system="reference, default", runs=3, recovered=3, missed=2, slowest_s=4.5)
    (*_, line) = reference_table([ROW, other]).splitlines()
    assert line == "| f | 3 / 20 / – | 2 | 80/80 | 0 | 0 | 23/23 | 4.5 |"


def test_a_row_that_is_not_green_says_why_below_the_table() -> None:
    table = reference_table([evolve(ROW, recovered=19, notes=("it was slow",))])
    assert table.endswith("- f, tcp: 40/40 · 19/20 recovered; it was slow")
    assert "Not as it should be" not in reference_table([ROW])


def test_connectors_stand_beside_each_other() -> None:
    rows = [
        evolve(ROW, system="pushkv", runs=3, recovered=3),
        evolve(ROW, system="NixlConnector", runs=3, recovered=3, right=38, wrong=2),
    ]
    (*_, line) = vllm_table(rows).splitlines()
    assert line == "| f | 40/40 in 3 runs, 0 s | not run | 38/40 · 2 wrong in 3 runs, 0 s |"


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="<!-- vllm -->"):
        filled("<!-- reference -->\n<!-- end of reference -->", [ROW])

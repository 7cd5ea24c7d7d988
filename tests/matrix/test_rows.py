"""What a row says, and that a run is taken up where it stopped."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from attrs import evolve
from rich.console import Console
from tests.matrix.rows import Row, Rows, show

RIGHT = Row("f", "pushkv", runs=1, clients=2, answered=2, right=2, recovered=1)


def test_runs_add_up_and_are_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    rows = Rows(path)
    rows.add(RIGHT)
    rows.add(evolve(RIGHT, right=1, wrong=1, leaked_blocks=3, slowest_s=2.5, notes=("why",)))
    again = Rows(path)
    assert again.rows == rows.rows
    assert (again.runs("f", "pushkv"), again.runs("g", "pushkv")) == (2, 0)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["clients"], row["right"], row["wrong"], row["leaked_blocks"]) == (4, 3, 1, 3)
    assert (row["slowest_s"], row["notes"]) == (2.5, ["why"])


@pytest.mark.parametrize(
    "changes", [{"right": 1}, {"leaked_blocks": 1}, {"recovered": 0}, {"runs": 0, "recovered": 0}]
)
def test_a_row_is_green_only_where_everything_is(changes: dict[str, int]) -> None:
    assert RIGHT.is_green
    assert not evolve(RIGHT, **changes).is_green  # type: ignore[arg-type]


def test_the_table_says_what_is_wrong() -> None:
    said = io.StringIO()
    bad = Row("f", "other", runs=2, clients=4, answered=3, right=1, wrong=2, leaked_blocks=7)
    show([RIGHT, bad], ["pushkv", "other"], Console(file=said, width=160))
    assert "2/2" in said.getvalue()
    for words in ("1/4", "2 wrong", "1 no answer", "7 lost", "0/2 recovered"):
        assert words in said.getvalue()

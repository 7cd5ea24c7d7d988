"""docs/machines.md is what the tables say, and it says all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pushkv.core.consumer import TERMINAL, ConsumerStatus
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.link import LINK
from pushkv.core.producer_table import PRODUCER
from pushkv.core.request import REQUEST
from pushkv.tables_page import diagram, main, page

COMMITTED = Path(__file__).parents[2] / "docs" / "machines.md"
ARROW = re.compile(r"    (\w+) --> (\w+): (.+)")
LINE = re.compile(r"\| (\w+) \| (.+?) \| (.+?) \| .+ \|")
TABLES = [CONSUMER, REQUEST, PRODUCER, LINK]


def section(text: str, table) -> str:
    return text.partition(f"## {table.name.capitalize()}\n")[2].partition("\n## ")[0]


def test_it_is_not_stale() -> None:
    assert COMMITTED.read_text(encoding="utf-8") == page(), "run `make docs-tables`"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_diagrams_have_every_arrow_and_no_other(table) -> None:
    drawn = {
        (source, target, event)
        for source, target, label in ARROW.findall(section(page(), table))
        for event in label.split("<br/>")
    }
    assert drawn == {
        (row.status.name, target.name, row.event.__name__)
        for row in table.rows.values()
        for target in row.targets - {row.status}
    }


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_row_is_listed_once_with_where_it_leads(table) -> None:
    listed = []
    for event, statuses, to in LINE.findall(section(page(), table))[1:]:
        names = [s.name for s in table.statuses] if statuses == "any" else statuses.split(", ")
        listed += [(name, event, to) for name in names]
    expected = []
    for row in table.rows.values():
        to = ", ".join(status.name for status in table.statuses if status in row.targets)
        if row.targets == {row.status}:
            to = "the same"
        expected.append((row.status.name, row.event.__name__, to if row.kind == "go" else row.kind))
    assert sorted(listed) == sorted(expected)


def test_a_diagram_marks_where_a_machine_begins_and_ends() -> None:
    text = diagram(CONSUMER, ConsumerStatus.REGISTERING, TERMINAL, ("Complete",))
    assert text.splitlines()[:3] == [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> REGISTERING",
    ]
    assert "    DELIVERED --> [*]" in text.splitlines()
    assert "QUARANTINED --> [*]" not in text


def test_the_command_writes_the_file_it_is_given(tmp_path: Path) -> None:
    target = tmp_path / "machines.md"
    assert main([str(target)]) == 0
    assert target.read_text(encoding="utf-8") == page()
    assert main([]) == 2

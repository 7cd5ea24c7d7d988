"""The page about the machines, made from the tables that run.

`python -m pushkv.tables_page docs/machines.md` writes it; the same tables give the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from pushkv.core.consumer import TERMINAL as CONSUMER_TERMINAL
from pushkv.core.consumer import ConsumerStatus
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.link import LINK, LinkStatus
from pushkv.core.producer import TERMINAL as PRODUCER_TERMINAL
from pushkv.core.producer import ProducerStatus
from pushkv.core.producer_table import PRODUCER
from pushkv.core.request import REQUEST, RequestStatus
from pushkv.core.request import TERMINAL as REQUEST_TERMINAL
from pushkv.core.table import Row, Table

__all__ = ["diagram", "main", "page"]

INTRODUCTION = """\
<!-- page: reference 50 -->
# The machines

Made by `make docs-tables` from the tables that run; a test fails when this page is stale. What the
statuses mean is said in the module of each machine, the rules (R1–R14) in
[protocol.md](protocol.md).

An arrow says that a row may end there, not that it must: what decides is the action, which the
tests and the model checker run. Arrows from a status to itself are in the tables alone.
"""

PRODUCER_FAMILIES: dict[str, tuple[str, ...]] = {
    "What its engine does": (
        "Arrived",
        "Computed",
        "PrefillPreempted",
        "PrefillResumed",
        "PrefillAborted",
    ),
    "What the consumer and the link do": (
        "RegistrationReceived",
        "Query",
        "Revoke",
        "Received",
        "LinkDown",
        "Permitted",
    ),
    "What the transport, proofs and time do": (
        "WriteDone",
        "WriteFailed",
        "WriteRefused",
        "WriteUnknown",
        "WriterGone",
        "Proven",
        "Tick",
    ),
}
"""One diagram of all the producer's arrows could not be read."""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [
        INTRODUCTION,
        *_machine(
            CONSUMER,
            "An attempt, at one consumer rank, towards one producer rank: `core/consumer.py`.",
            ConsumerStatus.REGISTERING,
            CONSUMER_TERMINAL,
        ),
        *_machine(
            REQUEST,
            "An attempt at the consumer's engine, over all its ranks: `core/request.py`.",
            RequestStatus.RECEIVING,
            REQUEST_TERMINAL,
        ),
        *_machine(
            PRODUCER,
            "A transfer, at one prefill rank, towards one consumer rank: `core/producer.py`. It "
            "begins as FAILED with nothing to remember, and what is over may be used again.",
            ProducerStatus.FAILED,
            PRODUCER_TERMINAL,
            PRODUCER_FAMILIES,
        ),
        *_machine(LINK, "One end of a connection: `core/link.py`.", LinkStatus.ENDED, ()),
    ]
    return "\n".join(parts)


def _machine(
    table: Table[Any],
    about: str,
    first: StrEnum,
    terminal: Iterable[StrEnum],
    families: dict[str, tuple[str, ...]] | None = None,
) -> Iterator[str]:
    rows = tuple(table.rows.values())
    acting = sum(row.kind == "go" for row in rows)
    yield f"## {table.name.capitalize()}\n"
    yield f"{about}\n"
    yield (
        f"{len(table.statuses)} statuses, {len(table.events)} events, {len(rows)} rows, of which "
        f"{acting} act and {len(rows) - acting} ignore.\n"
    )
    names = tuple(event.__name__ for event in table.events)
    for title, events in (families or {"": names}).items():
        if title:
            yield f"### {title}\n"
        yield diagram(table, first, terminal, events)
    if families:
        yield "### Its rows\n"
    yield _rows(table)


def diagram(
    table: Table[Any], first: StrEnum, terminal: Iterable[StrEnum], events: tuple[str, ...]
) -> str:
    """A Mermaid state diagram of what `events` may lead to, without arrows to the same status.

    Args:
        table: The machine's.
        first: The status in which it begins; marked where it has an arrow.
        terminal: The statuses in which it ends; marked where they have an arrow.
        events: Names of the events to draw.
    """
    labels: dict[tuple[StrEnum, StrEnum], list[str]] = {}
    for row in _ordered(table):
        if row.event.__name__ in events:
            for target in _in_order(table, row.targets - {row.status}):
                labels.setdefault((row.status, target), []).append(row.event.__name__)
    drawn = {status for pair in labels for status in pair}
    lines = ["```mermaid", "stateDiagram-v2"]
    if first in drawn:
        lines.append(f"    [*] --> {_short(first)}")
    for (source, target), names in labels.items():
        label = "<br/>".join(dict.fromkeys(names))
        lines.append(f"    {_short(source)} --> {_short(target)}: {label}")
    lines += [f"    {_short(status)} --> [*]" for status in terminal if status in drawn]
    return "\n".join([*lines, "```\n"])


def _rows(table: Table[Any]) -> str:
    """Rows that were decided together are one line."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in _ordered(table):
        key = (row.event, row.action, _to(table, row), row.why)
        groups.setdefault(key, []).append(row)
    lines = ["| on | in | to | why |", "|---|---|---|---|"]
    for event in table.events:
        for rows in groups.values():
            if rows[0].event is event:
                statuses = _statuses(table, [row.status for row in rows])
                to = _to(table, rows[0])
                lines.append(f"| {event.__name__} | {statuses} | {to} | {rows[0].why} |")
    return "\n".join([*lines, ""])


def _to(table: Table[Any], row: Row) -> str:
    if row.kind != "go":
        return row.kind
    if row.targets == {row.status}:
        return "the same"
    return ", ".join(map(_short, _in_order(table, row.targets)))


def _statuses(table: Table[Any], statuses: list[StrEnum]) -> str:
    return "any" if len(statuses) == len(table.statuses) else ", ".join(map(_short, statuses))


def _ordered(table: Table[Any]) -> Iterator[Row]:
    for status in table.statuses:
        for event in table.events:
            yield table.rows[status, event]


def _in_order(table: Table[Any], statuses: Iterable[StrEnum]) -> tuple[StrEnum, ...]:
    wanted = set(statuses)
    return tuple(status for status in table.statuses if status in wanted)


def _short(status: StrEnum) -> str:
    return status.name


def main(arguments: list[str]) -> int:
    """Write the page to the one file named."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m pushkv.tables_page FILE\n")
        return 2
    Path(arguments[0]).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

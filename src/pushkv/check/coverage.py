"""What was reached: a search that leaves a row out proves nothing about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pushkv.core.consumer_table import CONSUMER
from pushkv.core.link import LINK
from pushkv.core.producer_table import PRODUCER
from pushkv.core.request import REQUEST
from pushkv.core.table import Table

from .runner import Report

__all__ = ["IGNORED", "TABLES", "mislisted", "rows_that_act", "rows_that_fire", "unreached"]

TABLES: tuple[Table[Any], ...] = (CONSUMER, REQUEST, PRODUCER, LINK)
"""The tables that run, and no copies."""

IGNORED = frozenset(
    {
        "consumer.settling/Complete",
        "consumer.settling/Failed",
        "consumer.settling/Withdrawn",
        "consumer.revoking/Progress",
        "consumer.quarantined/Registered",
        "consumer.quarantined/Progress",
        "consumer.quarantined/Unproven",
        "consumer.registering/Proven",
        "consumer.registered/Proven",
        "consumer.settling/Proven",
        "consumer.revoking/Proven",
        "request.preempted/MemberTold",
        "request.releasing/MemberTold",
        "producer.failed/Computed",
        "producer.expected/Permitted",
        "producer.queued/Permitted",
        "producer.draining/Permitted",
        "producer.expected/WriterGone",
        "producer.queued/WriterGone",
        "producer.holding/WriterGone",
        "producer.writing/WriterGone",
        "producer.notifying/WriterGone",
        "producer.done/WriterGone",
        "producer.failed/WriterGone",
    }
)
"""Rows that ignore their event and that some standard configuration fires.

The others never fire: an endpoint forgets what is over, and asks no machine what it knows. The
searches take minutes, so what they fire is written down here; `mislisted` says when that is wrong.
"""


def rows_that_act(table: Table[Any]) -> tuple[str, ...]:
    """Names of a table's rows that run an action, in its order."""
    return tuple(row.name for row in table.rows.values() if row.kind == "go")


def rows_that_fire() -> frozenset[str]:
    """Every row that the composition of the machines can fire, as far as the searches reach.

    Those that act all do: a search of all standard configurations fails otherwise.
    """
    return IGNORED.union(*(rows_that_act(table) for table in TABLES))


def mislisted(reports: Iterable[Report]) -> tuple[str, ...]:
    """Rows that ignore, and fired or did not, unlike `IGNORED` says; of all configurations."""
    acting = frozenset[str]().union(*(rows_that_act(table) for table in TABLES))
    fired = {name for report in reports for _, name in report.rows}
    return tuple(sorted((fired - acting) ^ IGNORED))


def unreached(reports: Iterable[Report]) -> dict[str, tuple[str, ...]]:
    """By table, the acting rows that no search fired; tables without any are left out."""
    fired = frozenset[tuple[str, str]]().union(*(report.rows for report in reports))
    missing = {
        table.name: tuple(name for name in rows_that_act(table) if (table.name, name) not in fired)
        for table in TABLES
    }
    return {name: rows for name, rows in missing.items() if rows}

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

__all__ = ["TABLES", "rows_that_act", "unreached"]

TABLES: tuple[Table[Any], ...] = (CONSUMER, REQUEST, PRODUCER, LINK)
"""The tables that run, and no copies."""


def rows_that_act(table: Table[Any]) -> tuple[str, ...]:
    """Names of a table's rows that run an action, in its order."""
    return tuple(row.name for row in table.rows.values() if row.kind == "go")


def unreached(reports: Iterable[Report]) -> dict[str, tuple[str, ...]]:
    """By table, the acting rows that no search fired; tables without any are left out."""
    fired = frozenset[tuple[str, str]]().union(*(report.rows for report in reports))
    missing = {
        table.name: tuple(name for name in rows_that_act(table) if (table.name, name) not in fired)
        for table in TABLES
    }
    return {name: rows for name, rows in missing.items() if rows}

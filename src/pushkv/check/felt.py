"""Which mutants of rows make a difference anywhere in a run, found out in one run without any.

Whenever a row fires, what every mutant of it would have made of the same state and event is
compared with what the row has made of it. Where that is the same at every step, the whole run would
have been the same, step by step, with the mutant in force.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pushkv.core.ids import Instant
from pushkv.core.table import Row, Rules, Step, Table

from .mutants import of_rows
from .patch import Patch

__all__ = ["feeling"]


@contextmanager
def feeling() -> Iterator[set[str]]:
    """While this lasts, the names of mutants that make a difference are added to what it yields."""
    left: dict[tuple[str, str], dict[str, Row]] = {}
    for mutant in of_rows():
        if mutant.row is not None:
            left.setdefault(mutant.fires[0], {})[mutant.name] = mutant.row
    felt: set[str] = set()
    real = Table.step

    def step(table: Table[Any], state: Any, event: object, now: Instant, rules: Rules) -> Step[Any]:
        made = real(table, state, event, now, rules)
        unfelt = left.get((table.name, made.row.name))
        if unfelt:
            for name, row in list(unfelt.items()):
                if _would(row, state, event, now, rules) != (made.state, made.effects):
                    felt.add(name)
                    del unfelt[name]
        return made

    patch = Patch()
    patch.set(Table, "step", step)
    try:
        yield felt
    finally:
        patch.undo()


def _would(row: Row, state: Any, event: object, now: Instant, rules: Rules) -> object:
    """What a row makes of an event; None for an exception."""
    if row.action is None:
        return state, ()
    try:
        return row.action(state, event, now, rules)
    except Exception:  # noqa: BLE001 - which the row that runs does not raise
        return None

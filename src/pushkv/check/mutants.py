"""The protocol with one thing taken out of it: each must be missed, or nothing was proven.

A mutant is a row that is ignored, a row that ends in another status, a row without one of its
fences, a rule not in force, or another mistake. What becomes of them is found out in `trials`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from typing import Any

from attrs import evolve, frozen

from pushkv.core.copies import replace
from pushkv.core.ids import Instant
from pushkv.core.table import Row, Rules, Table

from .coverage import TABLES
from .fences import fences_of
from .known import KNOWN, rule_of
from .patch import Patch

__all__ = ["Mutant", "mutants", "of_rows", "of_rules"]

WORDS_MOST = 60


@frozen
class Mutant:
    """One thing taken out.

    Attributes:
        rule: Which rule it concerns, such as "R1"; "row" for rows of tables.
        fires: Rows that must fire for it to matter, as (table, row); empty for any.
        row: The row that replaces another, where that is all.
    """

    name: str
    rule: str
    fires: tuple[tuple[str, str], ...]
    apply: Callable[[Patch], None]
    row: Row | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """While this lasts the protocol is without it."""
        patch = Patch()
        try:
            self.apply(patch)
            yield
        finally:
            patch.undo()


# -- rows


def _ignored(row: Row) -> Row:
    return evolve(row, kind="ignore", action=None, targets=frozenset([row.status]))


def _stays(row: Row, table: Table[Any]) -> Row:
    """What it does is done, but the status is kept; where it is kept, the next one is taken."""
    statuses = tuple(table.statuses)
    following = statuses[(statuses.index(row.status) + 1) % len(statuses)]
    action = row.action
    assert action is not None, "only rows that act are retargeted"

    def astray(state: Any, event: Any, now: Instant, rules: Rules) -> Any:
        after, effects = action(state, event, now, rules)
        status: StrEnum = state.status if after.status is not state.status else following
        return replace(after, status=status), effects

    return evolve(row, action=astray, targets=frozenset(statuses))


def _replaced(table: Table[Any], kind: str, row: Row) -> Mutant:
    fires = ((table.name, row.name),)
    return Mutant(f"{kind}: {row.name}", "row", fires, lambda patch: patch.row(table, row), row)


def _of_row(table: Table[Any], row: Row) -> Iterator[Mutant]:
    yield _replaced(table, "dropped", _ignored(row))
    yield _replaced(table, "retargeted", _stays(row, table))
    for fence in fences_of(table, row):
        what = fence.what if len(fence.what) <= WORDS_MOST else f"{fence.what[:WORDS_MOST]}…"
        name = f"unfenced: {row.name}: {what}"
        fires = ((table.name, row.name),) if fence.row is not None else ()
        yield Mutant(name, "row", fires, fence.apply, fence.row)


@cache
def of_rows() -> tuple[Mutant, ...]:
    """Each acting row of each table dropped, retargeted, and without each of its fences."""
    return tuple(
        mutant
        for table in TABLES
        for row in table.rows.values()
        if row.kind == "go"
        for mutant in _of_row(table, row)
    )


def of_rules() -> tuple[Mutant, ...]:
    """Each rule taken out, in each way there is, and other mistakes."""
    return tuple(Mutant(name, rule_of(name), (), apply) for name, apply in KNOWN.items())


@cache
def mutants() -> Mapping[str, Mutant]:
    """All of them, by name: rules first. To be called first while none is in force."""
    return {each.name: each for each in (*of_rules(), *of_rows())}

"""Things of the core that are other than they are, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from attrs import evolve

from pushkv.core.table import Row, Table

__all__ = ["Apply", "Patch", "named_in", "swap"]


class Patch:
    """Attributes and rows that are other than they were until `undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute of a module or class."""
        before = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def row(self, table: Table[Any], row: Row) -> None:
        """Replace a row of a table."""
        key = (row.status, row.event)
        before = table._rows[key]
        self._undo.append(lambda: table._rows.__setitem__(key, before))
        table._rows[key] = row

    def undo(self) -> None:
        """Everything is as it was."""
        while self._undo:
            self._undo.pop()()


Apply = Callable[[Patch], None]


def named_in(known: dict[str, Apply]) -> Callable[[Apply], Apply]:
    """A decorator: the function is one more of those known, under its name in words."""

    def register(apply: Apply) -> Apply:
        known[apply.__name__.replace("_", " ")] = apply
        return apply

    return register


def swap(
    patch: Patch,
    table: Table[Any],
    statuses: Iterable[StrEnum],
    event: type,
    action: Callable[..., Any] | None,
) -> None:
    """In `statuses`, `event` runs `action` and may end anywhere; without one it is ignored."""
    for status in statuses:
        row = table.rows[status, event]
        new = evolve(
            row,
            kind="ignore" if action is None else "go",
            action=action,
            targets=frozenset(table.statuses),
        )
        patch.row(table, new)

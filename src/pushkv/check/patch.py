"""Things of the core that are other than they are, for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pushkv.core.table import Row, Table

__all__ = ["Patch"]


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

"""The rules of the protocol, each taken out for a while; `pushkv.check.taken_out` says how.

The tables are frozen; a test that wants to know what a row is good for swaps it for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import pytest
from attrs import evolve

from pushkv.check.patch import Patch
from pushkv.check.taken_out import TAKEN_OUT
from pushkv.core.table import Table

__all__ = ["TAKEN_OUT", "swap", "without"]


def swap(
    patch: pytest.MonkeyPatch,
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
        patch.setitem(table._rows, (status, event), new)


@contextmanager
def without(name: str) -> Iterator[None]:
    """While this lasts the rule is not in force."""
    patch = Patch()
    try:
        TAKEN_OUT[name](patch)
        yield
    finally:
        patch.undo()

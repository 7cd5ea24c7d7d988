"""What a fault came to: rows of a table that is printed, and kept so that a run can be taken up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from attrs import asdict, evolve, frozen
from rich.console import Console
from rich.table import Table

__all__ = ["Row", "Rows", "show", "words"]


@frozen
class Row:
    """One fault in one system, over all runs.

    Attributes:
        clients: How many were owed an answer.
        answered: How many got any in time.
        right: How many got what a single engine generates; or, where no healthy path was left, an
            honest error.
        wrong: How many got status 200 with other tokens.
        leaked_blocks: Of engines that run, never given back; over all runs.
        recovered: Runs after which a request was right again with nothing restarted but what the
            fault itself had killed.
        missed: Runs beside `runs` in which the fault came too late for its moment; repeated.
        untold: Failures of pushkv that were not one line of a log and one counter each.
        slowest_s: The longest that a client waited for its answer.
    """

    fault: str
    system: str
    runs: int = 0
    clients: int = 0
    answered: int = 0
    right: int = 0
    wrong: int = 0
    leaked_blocks: int = 0
    recovered: int = 0
    missed: int = 0
    untold: int = 0
    slowest_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def is_green(self) -> bool:
        """Every client right, no block lost, each failure told, healthy again each time."""
        healthy = self.leaked_blocks == self.untold == 0 and self.recovered == self.runs
        return self.runs > 0 and self.right == self.clients and healthy

    def plus(self, other: Row) -> Row:
        """Both together."""
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in (
                *("runs", "clients", "answered", "right", "wrong"),
                *("leaked_blocks", "recovered", "missed", "untold"),
            )
        }
        return evolve(
            self,
            **sums,
            slowest_s=max(self.slowest_s, other.slowest_s),
            notes=(*self.notes, *(each for each in other.notes if each not in self.notes))[:5],
        )


class Rows:
    """Rows in a file, written after every run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[tuple[str, str], Row] = {}
        if path.exists():
            for each in json.loads(path.read_text())["rows"]:
                row = Row(**{**each, "notes": tuple(each["notes"])})
                self.rows[row.fault, row.system] = row

    def runs(self, fault: str, system: str) -> int:
        """How often the fault was tried in the system."""
        row = self.rows.get((fault, system))
        return 0 if row is None else row.runs

    def add(self, row: Row) -> None:
        """Count one more run, and keep it."""
        before = self.rows.get((row.fault, row.system))
        self.rows[row.fault, row.system] = row if before is None else before.plus(row)
        self.save()

    def save(self) -> None:
        """Write the file anew, whole or not at all."""
        text = json.dumps({"rows": [asdict(each) for each in self.rows.values()]}, indent=1)
        draft = self._path.with_suffix(".draft")
        draft.write_text(text + "\n")
        draft.replace(self._path)


def show(rows: Iterable[Row], systems: Sequence[str], console: Console) -> None:
    """Print a table, one line for each fault, one column for each system."""
    table = Table(title="clients right of asked · wrong · blocks lost · runs recovered")
    table.add_column("fault")
    for system in systems:
        table.add_column(system)
    by_fault: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_fault.setdefault(row.fault, {})[row.system] = row
    for fault, found in by_fault.items():
        table.add_row(fault, *(_cell(found.get(system)) for system in systems))
    console.print(table)


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"[{'green' if row.is_green else 'red'}]{words(row)}"


def words(row: Row) -> str:
    """Clients that were right of those that were asked, and whatever was not as it should be."""
    silent = row.clients - row.answered
    parts = [f"{row.right}/{row.clients}"]
    parts += [f"{row.wrong} wrong"] * (row.wrong > 0)
    parts += [f"{silent} no answer"] * (silent > 0)
    parts += [f"{row.leaked_blocks} lost"] * (row.leaked_blocks > 0)
    parts += [f"{row.untold} untold"] * (row.untold > 0)
    parts += [f"{row.recovered}/{row.runs} recovered"] * (row.recovered < row.runs)
    return " · ".join(parts)

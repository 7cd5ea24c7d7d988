"""Scenario scripts as killers: what each fires, and whether it still comes out as it is written."""

from __future__ import annotations

from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path
from typing import Any

from attrs import field, frozen

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import Instant
from pushkv.core.table import Rules, Step, Table
from pushkv.testing.scenario import run

from .felt import feeling
from .patch import Patch

__all__ = ["FOLDERS", "Script", "find", "scripts"]

ROOT = Path(__file__).parents[3]
FOLDERS = (ROOT / "tests" / "scenarios", ROOT / "tests" / "check" / "rows")
"""Where the scripts are, in a checkout of the source."""


@frozen
class Script:
    """A scenario script, and what its run comes to.

    Attributes:
        steps: Steps of all machines.
        rows: Rows that fired, as (table, row).
        felt: Mutants of rows that make a difference in it; see `felt`.
    """

    name: str
    text: str = field(repr=False)
    steps: int = 0
    rows: frozenset[tuple[str, str]] = field(default=frozenset(), repr=False)
    felt: frozenset[str] = field(default=frozenset(), repr=False)

    def broken(self) -> str:
        """What is otherwise than it is written; "" for nothing."""
        patch = Patch()
        left = [20 * self.steps + 1_000]

        def watch(table: Table[Any], step: Step[Any]) -> None:
            left[0] -= 1
            assert left[0] > 0, "there is no end to its steps"

        _watched(patch, watch)
        try:
            out = run(self.text)
        except Exception as error:  # noqa: BLE001 - whatever it is, it was not so before
            return f"{type(error).__name__}: {error}"
        finally:
            patch.undo()
        changes = unified_diff(self.text.splitlines(), out.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in changes if not line.startswith(("---", "+++", "@@")))


def _watched(patch: Patch, watch: Callable[[Table[Any], Step[Any]], None]) -> None:
    real = Table.step

    def step(table: Table[Any], state: Any, event: object, now: Instant, rules: Rules) -> Step[Any]:
        made = real(table, state, event, now, rules)
        watch(table, made)
        return made

    patch.set(Table, "step", step)


def find(name: str) -> Script:
    """The script of that name.

    Raises:
        KeyError: There is none.
    """
    for folder in FOLDERS:
        path = folder / f"{name}.txt"
        if path.exists():
            return _measured(path)
    raise KeyError(name)


def scripts() -> tuple[Script, ...]:
    """All scripts, those of the fewest steps first.

    Raises:
        ConfigurationError: They are not there: this is no checkout of the source.
    """
    paths = [path for folder in FOLDERS for path in sorted(folder.glob("*.txt"))]
    if not paths:
        raise ConfigurationError("mutants", str(FOLDERS[0]), "scripts: a checkout of the source")
    return tuple(sorted(map(_measured, paths), key=lambda each: (each.steps, each.name)))


def _measured(path: Path) -> Script:
    text = path.read_text(encoding="utf-8")
    rows: set[tuple[str, str]] = set()
    steps = 0

    def watch(table: Table[Any], step: Step[Any]) -> None:
        nonlocal steps
        steps += 1
        rows.add((table.name, step.row.name))

    patch = Patch()
    with feeling() as felt:
        _watched(patch, watch)
        try:
            out = run(text)
        finally:
            patch.undo()
    assert out == text, f"{path.name} does not come out as it is written"
    return Script(path.stem, text, steps, frozenset(rows), frozenset(felt))

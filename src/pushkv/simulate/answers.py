"""What an answer is: a table, what it was run on, and a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from attrs import field, frozen

from .run import Interrupted, Result, simulate
from .settings import Settings

__all__ = ["Answer", "Cells", "Figure", "Lines", "Progress"]


Lines = dict[str, list[tuple[float, float]]]
"""Per name its points (x, y)."""


class Progress(Protocol):
    """Told how far it is."""

    def __call__(self, cell: int, cells: int, what: str, share: float, /) -> None:
        """`share` of cell number `cell` of `cells` is done."""


@frozen
class Figure:
    """Lines over one axis.

    Attributes:
        lines: Per name its points (x, y).
    """

    title: str
    x: str
    y: str
    lines: Lines
    log_x: bool = False
    log_y: bool = False


@frozen
class Answer:
    """One question's table.

    Attributes:
        about: What was run, and what the columns are.
        partial: It was interrupted: rows are missing.
    """

    title: str
    about: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    figure: Figure | None
    results: list[dict[str, object]] = field(factory=list)
    partial: bool = False


class Cells:
    """Runs the cells of an answer in order, tells how far it is, and stops at Ctrl-C."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self.partial: bool = False

    def run(self, cells: Iterable[tuple[str, Settings]]) -> list[tuple[Settings, Result]]:
        """The results of those that were run to their end."""
        todo = list(cells)
        done: list[tuple[Settings, Result]] = []
        for number, (what, settings) in enumerate(todo):
            try:
                done.append((settings, simulate(settings, self._telling(number, todo, what))))
            except (Interrupted, KeyboardInterrupt):
                self.partial = True
                break
        return done

    def _telling(
        self, number: int, todo: list[tuple[str, Settings]], what: str
    ) -> Callable[[int], None] | None:
        progress = self._progress
        if progress is None:
            return None
        requests = todo[number][1].traffic.requests
        progress(number, len(todo), what, 0.0)
        return lambda ended: progress(number, len(todo), what, ended / requests)

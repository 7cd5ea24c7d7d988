"""The ratios by which pushkv is judged: its figure over another's, in one cell of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import frozen

from .results import CellResult, ModeResult, Results

__all__ = ["Ratio", "bars", "ratios"]

IDLE_BAR = 0.1
FLOOR_S = 1e-4
"""A figure below this counts as this much: an excess can be negative, by noise."""


@frozen
class Ratio:
    """One comparison.

    Attributes:
        cell: Title of the cell.
        figure: What is compared.
        other: With which mode.
        mine: Of pushkv.
        theirs: Of the other.
        most: What `value` may be.
    """

    cell: str
    figure: str
    other: str
    mine: float
    theirs: float
    most: float

    @property
    def value(self) -> float:
        """Pushkv's figure over the other's."""
        return max(self.mine, FLOOR_S) / max(self.theirs, FLOOR_S)

    @property
    def noise(self) -> bool:
        """Whether a figure is not even positive: what was subtracted was measured in worse times.

        Such a comparison says nothing, however good the ratio looks.
        """
        return min(self.mine, self.theirs) <= 0

    @property
    def met(self) -> bool:
        """Whether it is no more than it may be, and not by noise."""
        return not self.noise and self.value <= self.most

    @property
    def verdict(self) -> str:
        """In a word."""
        return "noise" if self.noise else "met" if self.met else "missed"


def _excess(one: ModeResult) -> float | None:
    return one.excess_s


def _tpot(one: ModeResult) -> float | None:
    return None if one.tpot_s is None else one.tpot_s.p50


def _hooks(one: ModeResult) -> float | None:
    return one.hooks.cpu_s / one.n if one.hooks is not None and one.n else None


FIGURES: tuple[tuple[str, str, float, Callable[[ModeResult], float | None]], ...] = (
    ("TTFT less prefill", "push", 0.6, _excess),
    ("TTFT less prefill", "push_sequential", 1.0, _excess),
    ("TTFT less prefill", "pull", 0.5, _excess),
    ("TPOT", "push", 1.0, _tpot),
    ("TPOT", "push_sequential", 1.0, _tpot),
    ("TPOT", "pull", 1.0, _tpot),
    ("CPU in hooks per request", "push", 0.5, _hooks),
    ("CPU in hooks per request", "push_sequential", 0.5, _hooks),
    ("CPU in hooks per request", "pull", 0.5, _hooks),
)


def ratios(cell: CellResult) -> Iterator[Ratio]:
    """The comparisons of a cell, as far as the modes ran and something completed."""
    mine = cell.modes.get("pushkv")
    if mine is None:
        return
    for figure, other, most, read in FIGURES:
        theirs = cell.modes.get(other)
        if theirs is None:
            continue
        left, right = read(mine), read(theirs)
        if left is not None and right is not None:
            yield Ratio(cell.title, figure, other, left, right, most)


def bars(results: Results) -> list[Ratio]:
    """All comparisons of a run. That of idle CPU is made where the others are as shipped."""
    found = [ratio for cell in results.cells for ratio in ratios(cell)]
    idle = results.idle_cpu_share
    if results.configuration.get("as_shipped") and "pushkv" in idle:
        found += [
            Ratio("idle", "CPU of the pair", other, idle["pushkv"], idle[other], IDLE_BAR)
            for other in ("push", "pull")
            if other in idle
        ]
    return found

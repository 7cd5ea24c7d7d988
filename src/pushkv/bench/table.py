"""A run as tables on a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .bars import Ratio, bars
from .results import CellResult, ModeResult, Percentiles, Results

__all__ = ["show"]

COLOURS = {"met": "green", "missed": "red", "noise": "yellow"}


def show(results: Results, console: Console) -> None:
    """Print two tables per cell, and the ratios by which pushkv is judged.

    Times are in milliseconds; three in a row are the percentiles 50, 95 and 99.
    """
    console.print("Times in ms; three in a row are p50 / p95 / p99.")
    for cell in results.cells:
        console.print(_clients(cell))
        console.print(_engines(cell))
    idle = ", ".join(
        f"{mode} {100 * share:.1f} %" for mode, share in results.idle_cpu_share.items()
    )
    console.print(f"CPU of a core while nobody asks: {idle}")
    found = bars(results)
    if found:
        console.print(_bars(found))


def _clients(cell: CellResult) -> Table:
    heads = ("TTFT", "less prefill", "TPOT", "good", "n", "left", "failed")
    table = _table(f"{cell.title}: prefill alone {_ms(cell.prefill_only_s)} ms", heads)
    for mode, one in cell.modes.items():
        table.add_row(
            mode,
            _three(one.ttft_s),
            "" if one.excess_s is None else _ms(one.excess_s),
            _three(one.tpot_s),
            f"{100 * one.good_share:.0f} %",
            str(one.n),
            str(one.cancelled),
            f"[red]{one.failed}[/]" if one.failed else "0",
        )
    return table


def _engines(cell: CellResult) -> Table:
    heads = ("moved", "exposed", "early", "queued", "CPU, s", "CPU in hooks", "cost")
    table = _table("", heads)
    for mode, one in cell.modes.items():
        table.add_row(mode, *_engine_row(one))
    return table


def _engine_row(one: ModeResult) -> tuple[str, ...]:
    transfers = one.transfers
    moved = one.nixl_transfer_s if transfers is None else transfers.write_s.p50
    queued = [one.queue_s[name] for name in ("mono", "prefill", "decode") if name in one.queue_s]
    return (
        "" if moved is None else _ms(moved),
        "" if transfers is None else _ms(transfers.exposed_s.p50),
        "" if transfers is None else f"{100 * transfers.early_share:.0f} %",
        ", ".join(_ms(each) for each in queued),
        f"{one.cpu_s:.1f}",
        "" if one.hooks is None else _ms(one.hooks.cpu_s),
        "" if one.cost_per_request is None else f"{one.cost_per_request:.3g}",
    )


def _table(title: str, heads: tuple[str, ...]) -> Table:
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD)
    for name in ("", *heads):
        table.add_column(name, justify="right" if name else "left")
    return table


def _bars(found: list[Ratio]) -> Table:
    table = Table(title="pushkv over the others", title_justify="left", box=SIMPLE_HEAD)
    for name in ("cell", "figure", "over", "pushkv", "the other", "ratio", "bar", ""):
        table.add_column(name, justify="right" if name in {"ratio", "bar"} else "left")
    for one in found:
        scale = (lambda value: f"{100 * value:.1f} %") if one.cell == "idle" else _ms
        table.add_row(
            one.cell,
            one.figure,
            one.other,
            scale(one.mine),
            scale(one.theirs),
            f"{one.value:.2f}",
            f"{one.most:g}",
            f"[{COLOURS[one.verdict]}]{one.verdict}[/]",
        )
    return table


def _three(found: Percentiles | None) -> str:
    return "" if found is None else " / ".join(_ms(at) for at in (found.p50, found.p95, found.p99))


def _ms(seconds: float) -> str:
    value = 1_000 * seconds
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"

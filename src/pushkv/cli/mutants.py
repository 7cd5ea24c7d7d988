"""`pushkv check --mutants`: the protocol with one thing taken out of it, again and again."""

from __future__ import annotations

import os
from json import dumps
from pathlib import Path

from attrs import asdict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pushkv.check.configurations import MUTATION
from pushkv.check.digest import core_digest
from pushkv.check.kept import EQUIVALENT_MOST, KEPT, Keeper, read, summary, write
from pushkv.check.mutants import mutants
from pushkv.check.trials import Fate, run

__all__ = ["run_mutants"]


def run_mutants(
    *,
    jobs: int = 0,
    out: Path | None = None,
    checkpoints: Path | None = None,
    keep: bool = False,
) -> bool:
    """Try every mutant; print what became of each.

    Args:
        jobs: How many at a time; 0 for one per core.
        out: Where to write what was found, as JSON.
        checkpoints: A folder from which a run that was cut off is taken up.
        keep: Take the fates that were kept in the source for this core, and keep all of them there.

    Returns whether none survives and few enough change nothing.
    """
    console = Console()
    names = list(mutants())
    keeper = None if checkpoints is None else Keeper(checkpoints)
    known = dict(keeper.known()) if keeper is not None else {}
    if keep and KEPT.exists():
        digest, fates = read(KEPT)
        known |= fates if digest == core_digest() else {}
    found = _run(console, names, known, keeper, jobs or os.cpu_count() or 1)
    _show(console, found)
    if keep:
        write(KEPT, found)
    if out is not None:
        whole = {**summary(found), "fates": [asdict(fate) for fate in found]}
        out.write_text(dumps(whole, indent=2) + "\n")
    few = sum(fate.equivalent for fate in found) < EQUIVALENT_MOST * len(found)
    return few and not any(fate.survives for fate in found)


def _run(
    console: Console,
    names: list[str],
    known: dict[str, Fate],
    keeper: Keeper | None,
    jobs: int,
) -> list[Fate]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("mutants", total=len(names), completed=sum(n in known for n in names))

        def done(fate: Fate) -> None:
            if keeper is not None:
                keeper.keep(fate)
            bar.advance(task)
            console.print(_line(fate), highlight=False, markup=False)

        return run(names, MUTATION, jobs=jobs, known=known, done=done)


def _line(fate: Fate) -> str:
    how = f" by {fate.by}" if fate.by else ""
    where = f" in {fate.where}" if fate.where else ""
    return f"{fate.rule:4} {fate.name}: {fate.told}{how}{where}"


def _show(console: Console, fates: list[Fate]) -> None:
    for fate in fates:
        if fate.rule != "row" and fate.story:
            title = f"{fate.rule}: {fate.name}"
            console.print(f"\n{title}\n{fate.story}", highlight=False, markup=False)
    table = Table("", "mutants", "killed", "equivalent", "survivors", title="what was taken out")
    kinds: dict[str, list[Fate]] = {}
    for fate in fates:
        kind = fate.name.partition(":")[0] if fate.rule == "row" else "rules and mistakes"
        kinds.setdefault(kind, []).append(fate)
    for kind, those in kinds.items():
        table.add_row(kind, *_counts(those))
    table.add_section()
    table.add_row("all", *_counts(fates))
    console.print(table)
    for fate in fates:
        if not fate.by:
            console.print(_line(fate), highlight=False, markup=False)


def _counts(fates: list[Fate]) -> tuple[str, ...]:
    equivalent = sum(fate.equivalent for fate in fates)
    survivors = sum(fate.survives for fate in fates)
    killed = len(fates) - equivalent - survivors
    return tuple(str(each) for each in (len(fates), killed, equivalent, survivors))

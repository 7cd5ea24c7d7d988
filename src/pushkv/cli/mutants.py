"""`pushkv check --mutants`: the protocol with one thing taken out of it, again and again."""

from __future__ import annotations

import os
from json import dumps
from pathlib import Path

from attrs import asdict
from rich.console import Console
from rich.table import Table

from pushkv.check.configurations import MUTATION
from pushkv.check.mutants import mutants
from pushkv.check.trials import Fate, run

__all__ = ["run_mutants"]


def run_mutants(*, jobs: int, out: Path | None) -> bool:
    """Try every mutant; print what became of each. Returns whether none survives."""
    console = Console()
    names = list(mutants())

    def done(fate: Fate) -> None:
        end = "SURVIVES" if fate.survives else "equivalent" if fate.equivalent else fate.by
        where = f" in {fate.where}" if fate.where else ""
        console.print(f"{fate.rule:4} {fate.name}: {end}{where}", highlight=False, markup=False)

    fates = run(names, MUTATION, jobs=jobs or os.cpu_count() or 1, done=done)
    for fate in fates:
        if fate.rule != "row" and fate.story:
            console.print(
                f"\n{fate.rule}: {fate.name}\n{fate.story}", highlight=False, markup=False
            )
    survivors = [fate for fate in fates if fate.survives]
    equivalent = [fate for fate in fates if fate.equivalent]
    killed = len(fates) - len(survivors) - len(equivalent)
    table = Table("mutants", "killed", "equivalent", "survivors")
    table.add_row(*(str(each) for each in (len(fates), killed, len(equivalent), len(survivors))))
    console.print(table)
    if out is not None:
        found = {
            "mutants": len(fates),
            "killed": killed,
            "equivalent": len(equivalent),
            "survivors": [fate.name for fate in survivors],
            "fates": [asdict(fate) for fate in fates],
        }
        out.write_text(dumps(found, indent=2) + "\n")
    return not survivors

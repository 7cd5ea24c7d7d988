"""`pushkv check`: search everything that can happen within bounds, on the tables that run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from attrs import asdict
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pushkv.check.configurations import STANDARD, Configuration
from pushkv.check.configurations_deep import DEEP
from pushkv.check.coverage import mislisted, unreached
from pushkv.check.runner import Report, check
from pushkv.check.search import NO_LIMITS, Limits, Progress
from pushkv.core.errors import ConfigurationError

from .mutants import run_mutants
from .scenarios import (
    ReplayOption,
    ScenariosOption,
    WithoutOption,
    run_replay,
    search_without,
    write_scenarios,
)

__all__ = ["check_command"]

LINE_EVERY_S = 30.0
"""Where nobody watches, one line of each search's progress in so many seconds."""


def check_command(
    config: Annotated[
        list[str] | None, typer.Option(help="Only this configuration; may be repeated.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Larger configurations, for as long as is asked.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(help="With --deep: for how long each configuration.", min=1)
    ] = 600,
    states: Annotated[
        int, typer.Option(help="With --deep: at most so many states of each; 0 for all.", min=0)
    ] = 0,
    memory_mib: Annotated[
        int,
        typer.Option(help="With --deep: most memory of each process; 0 for any.", min=0),
    ] = 3_000,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="With --deep or --mutants: put what is found down there, and take it up again. "
            "The files are pickles: use your own only.",
            file_okay=False,
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Configurations at a time; 0 for one per core.", min=0)
    ] = 0,
    mutants: Annotated[
        bool,
        typer.Option("--mutants", help="Take each rule and each row out, and see what breaks."),
    ] = False,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", help="With --mutants: keep what becomes of them in the source's tests."
        ),
    ] = False,
    without: WithoutOption = "",
    scenarios: ScenariosOption = None,
    replay: ReplayOption = None,
    json: Annotated[
        Path | None, typer.Option(help="Write what was found there.", dir_okay=False)
    ] = None,
) -> None:
    """Search everything that can happen within bounds, on the tables that run.

    The real machines, a network, transports, time, crashes and restarts are composed, and every
    interleaving is looked at. A violation is told as a story, with the shortest way there. Exit
    code 0 only if nothing is broken and, but with --deep, nothing was left out.

    With --scenarios DIRECTORY each violation is also written as a script, a line for each step, and
    --replay FILE makes it again on the machines as they are now: exit code 1 if it is still broken,
    0 if it holds or a step is not possible any more.

    Example: pushkv check --config cancel --json found.json
    """
    if replay is not None:
        passed = run_replay(replay)
    elif mutants:
        passed = run_mutants(jobs=jobs, out=json, checkpoints=checkpoints, keep=keep)
    else:
        passed = run_check(
            config or (),
            deep=deep,
            limits=Limits(states, seconds, memory_mib) if deep else NO_LIMITS,
            checkpoints=checkpoints,
            jobs=jobs,
            out=json,
            without=without,
            scenarios=scenarios,
        )
    if not passed:
        raise typer.Exit(1)


def run_check(
    names: Sequence[str],
    *,
    deep: bool = False,
    limits: Limits = NO_LIMITS,
    checkpoints: Path | None = None,
    jobs: int = 0,
    out: Path | None = None,
    without: str = "",
    scenarios: Path | None = None,
) -> bool:
    """Search the named configurations, or all of the set; print what was found.

    Returns whether nothing is broken and, but for `deep`, nothing was left out: every search ended,
    and unless names are given every row that acts was reached.

    Raises:
        ConfigurationError: There is no configuration, or no mutant, of that name.
    """
    console = Console()
    chosen = _chosen(names, DEEP if deep else STANDARD)
    if checkpoints is not None:
        checkpoints.mkdir(parents=True, exist_ok=True)
    kept = checkpoints if deep else None
    if without:
        reports = search_without(without, chosen, limits)
    else:
        reports = _run(console, chosen, limits, kept, jobs or os.cpu_count() or 1)
    _show(console, reports)
    missing = unreached(reports)
    if not names:
        for table, rows in missing.items():
            console.print(f"{table}: rows that nothing reached: {', '.join(rows)}", highlight=False)
    wrong = () if names or deep else mislisted(reports)
    if wrong:
        console.print(f"not as check/coverage.py lists them: {', '.join(wrong)}", highlight=False)
    for report in reports:
        for told in report.violations:
            text = f"\n{told.story}\n\n{told.mermaid}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    if scenarios is not None:
        for path in write_scenarios(scenarios, reports):
            console.print(f"\nwritten: {path}", highlight=False, markup=False, soft_wrap=True)
    if out is not None:
        out.write_text(dumps(_as_json(reports, missing), indent=2) + "\n")
    broken = any(report.violations for report in reports)
    if broken or deep:
        return not broken
    return all(report.complete for report in reports) and (bool(names) or not (missing or wrong))


def _chosen(
    names: Sequence[str], configurations: tuple[Configuration, ...]
) -> tuple[Configuration, ...]:
    known = {each.name: each for each in configurations}
    for name in names:
        if name not in known:
            raise ConfigurationError("config", name, f"one of {', '.join(known)}")
    return tuple(known[name] for name in names) or configurations


def _run(
    console: Console,
    chosen: tuple[Configuration, ...],
    limits: Limits,
    checkpoints: Path | None,
    jobs: int,
) -> list[Report]:
    bar = Bar(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    )
    told: dict[str, float] = {}
    with bar:
        tasks = {each.name: bar.add_task(f"{each.name}: waits", total=None) for each in chosen}

        def news(name: str, now: Progress) -> None:
            text = (
                f"{name}: {now.states:,} states, {now.rate:,.0f}/s, "
                f"frontier {now.frontier:,}, depth {now.depth}"
            )
            bar.update(tasks[name], description=text)
            if not console.is_terminal and now.seconds >= told.get(name, 0) + LINE_EVERY_S:
                told[name] = now.seconds
                console.print(text, highlight=False, soft_wrap=True)

        def done(report: Report) -> None:
            bar.remove_task(tasks[report.name])
            if not console.is_terminal:
                text = f"{report.name}: {report.states} states, {report.edges} edges"
                console.print(text, highlight=False, soft_wrap=True)

        return check(
            chosen, jobs=jobs, limits=limits, checkpoints=checkpoints, news=news, done=done
        )


def _show(console: Console, reports: list[Report]) -> None:
    table = Table("configuration", title="what was searched")
    for name in ("states", "edges", "depth", "seconds", "violations"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in reports:
        end = "" if each.complete else "violated" if each.violations else "limit reached"
        table.add_row(
            each.name,
            f"{each.states:,}",
            f"{each.edges:,}",
            str(each.depth),
            f"{each.seconds:.1f}",
            str(len(each.violations)),
            end,
        )
    states, edges = (sum(getattr(each, name) for each in reports) for name in ("states", "edges"))
    table.add_section()
    table.add_row("all", f"{states:,}", f"{edges:,}", "", "", "", "")
    console.print(table)


def _as_json(reports: list[Report], missing: dict[str, tuple[str, ...]]) -> dict[str, object]:
    return {
        "configs": [
            {
                "name": each.name,
                "states": each.states,
                "edges": each.edges,
                "depth": each.depth,
                "complete": each.complete,
                "seconds": round(each.seconds, 3),
                "violations": [asdict(told) for told in each.violations],
            }
            for each in reports
        ],
        "unreached_rows": {table: list(rows) for table, rows in missing.items()},
    }

"""`pushkv trace`: what can be done with the trace of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from pushkv.check.coverage import TABLES, rows_that_act, rows_that_fire
from pushkv.observe.replay import TraceReport, check_trace

from .conventions import App
from .trace_view import export_command, view_command

__all__ = ["trace_app"]

trace_app: App = App(
    help="What an engine wrote about its steps (`trace_path`).", no_args_is_help=True
)


trace_app.command("view")(view_command)
trace_app.command("export")(export_command)


@trace_app.callback()
def root() -> None:
    """What an engine wrote about its steps (`trace_path`)."""


@trace_app.command()
def check(
    traces: Annotated[list[Path], typer.Argument(help="Traces, one of each engine.")],
    json: Annotated[
        Path | None, typer.Option(help="Write what was found there.", dir_okay=False)
    ] = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="Say which rows these traces fired, all together.")
    ] = False,
) -> None:
    """Run traces again through the tables, and report each one's first illegal line.

    Row, status and effects of every step must be what the tables say. Exit code 1 if some line of
    some trace is illegal, 2 if a trace cannot be read.

    Example: pushkv trace check P.ndjson D.ndjson --rows
    """
    console = Console(soft_wrap=True)
    reports = [check_trace(path) for path in traces]
    for report in reports:
        console.print(_told(report), highlight=False, markup=False)
    if rows:
        for line in _coverage(frozenset().union(*(report.rows for report in reports))):
            console.print(line, highlight=False, markup=False)
    if json is not None:
        found = msgspec.to_builtins(reports, enc_hook=str)
        json.write_bytes(msgspec.json.encode({"traces": found}))
    if any(report.illegal for report in reports):
        raise typer.Exit(1)


def _told(report: TraceReport) -> str:
    if report.illegal is not None:
        return f"{report.path}: illegal\n{report.illegal}"
    return (
        f"{report.path}: {report.steps} steps of {len(report.rows)} rows, {report.lines} lines, "
        f"{report.alive} machines alive at the end"
    )


def _coverage(fired: frozenset[str]) -> Iterator[str]:
    """Which rows have fired, of those that a search of the model checker fires."""
    can_fire = rows_that_fire()
    for table in TABLES:
        able = [row.name for row in table.rows.values() if row.name in can_fire]
        missing = [name for name in able if name not in fired]
        told = f"; not {', '.join(missing)}" if missing else ""
        yield f"{table.name}: {len(able) - len(missing)} of {len(able)} rows that can fire{told}"
    beyond = sorted(fired - can_fire)
    if beyond:
        yield f"beyond what the model checker fires: {', '.join(beyond)}"
    acting = {name for table in TABLES for name in rows_that_act(table)}
    every = sum(len(table.rows) for table in TABLES)
    yield (
        f"all: {len(fired & can_fire)} of {len(can_fire)} rows that can fire, "
        f"{len(fired & acting)} of {len(acting)} that act, {len(fired)} of {every}"
    )

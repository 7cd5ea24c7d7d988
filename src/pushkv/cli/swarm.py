"""`pushkv swarm`: many engines and every fault in virtual time, from one seed."""

from __future__ import annotations

import secrets
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from attrs import asdict
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from pushkv.testing.swarm import Backend, Kind, SwarmReport, SwarmSettings, run_swarm

__all__ = ["swarm_command"]


def swarm_command(
    seed: Annotated[
        int | None,
        typer.Option(help="Of every choice; a new one by default. It is printed first.", min=0),
    ] = None,
    transfers: Annotated[int, typer.Option(help="Requests in each run.", min=1)] = 2000,
    engines: Annotated[
        int, typer.Option(help="Half of them prefill, half decode; some with two ranks.", min=2)
    ] = 20,
    backend: Annotated[
        Backend, typer.Option(help="Whose event loop the runtimes live in.")
    ] = Backend.ASYNCIO,
    weather: Annotated[
        Kind,
        typer.Option(
            help="crowd: all at once, into big pools; storm: tiny pools, links lost all the time."
        ),
    ] = Kind.MIXED,
    runs: Annotated[
        int, typer.Option(help="So many runs, each with the next seed; the first that fails ends.")
    ] = 1,
    json: Annotated[
        Path | None, typer.Option(help="Write what was found there.", dir_okay=False)
    ] = None,
) -> None:
    """Run many engines and every fault in virtual time, and check each step.

    The runtimes are the real ones: endpoint, channel, wire format, bridge, over the memory
    transport. The seed draws the weather (which transport, how bad network and clocks are, how
    small pools and bounds), and then all that happens: connections lost at one end, paths cut,
    messages late, WRITEs that fail, land late or in part, engines that crash and come back, clients
    that cancel, requests that are preempted, aborted or never dispatched.

    After every event no byte may be in a block of somebody else (I1), what is delivered must be the
    prompt's, byte for byte (I2), each attempt has one outcome and then one release (I3), and every
    block is in one place (I4). In the end every request must have ended, and all blocks be back.

    The same seed gives the same run, event by event: the digest says so. Exit code 1 where
    something did not hold, with the command that shows it again.

    Example: pushkv swarm --seed 7 --transfers 200 --engines 4
    """
    first = secrets.randbits(31) if seed is None else seed
    reports = []
    for number in range(first, first + runs):
        settings = SwarmSettings(number, transfers, engines, backend, weather)
        typer.echo(f"seed {number}: {settings.command}")
        reports.append(_run(settings))
        _tell(reports[-1])
        if reports[-1].violation is not None:
            break
    if json is not None:
        found = {"runs": [{**asdict(each), "command": each.settings.command} for each in reports]}
        json.write_text(dumps(found, indent=2) + "\n")
    if reports[-1].violation is not None:
        raise typer.Exit(1)


def _run(settings: SwarmSettings) -> SwarmReport:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("begins")

        def progress(told: int, virtual_s: float) -> None:
            done = f"{told:,} of {settings.transfers:,} requests have ended"
            bar.update(task, description=f"{done}, {virtual_s:.0f} virtual seconds")

        return run_swarm(settings, progress)


def _tell(report: SwarmReport) -> None:
    outcomes = ", ".join(f"{count:,} {name}" for name, count in report.outcomes.items())
    faults = ("crash", "stop", "connection lost", "path cut", "slow link")
    struck = ", ".join(f"{report.counters.get(name, 0)} x {name}" for name in faults)
    writes = ", ".join(
        f"{count:,} {name.removeprefix('writes ')}"
        for name, count in report.counters.items()
        if name.startswith("writes ")
    )
    typer.echo(
        f"  transport {report.transport}, {report.virtual_s:.0f} virtual seconds in "
        f"{report.wall_s:.1f}\n"
        f"  requests: {outcomes}; at most {report.open_most:,} at a time, "
        f"{report.live_most:,} attempts live at once\n"
        f"  WRITEs: {writes}\n"
        f"  faults: {struck}\n"
        f"  {report.events:,} events through {len(report.rows)} rows, "
        f"{report.quarantined} blocks in quarantine at the end\n"
        f"  digest {report.digest}"
    )
    if report.violation is not None:
        found = report.violation
        typer.echo(
            f"VIOLATION of {found.invariant} after {found.at_s:.9f} virtual seconds:\n"
            f"  {found.detail}\nAgain: {report.settings.command}"
        )

"""`pushkv simulate`: how long requests wait for their KV cache, by design."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from attrs import asdict
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pushkv.simulate.accuracy import accuracy, parameters
from pushkv.simulate.answers import Answer
from pushkv.simulate.answers import Progress as Telling
from pushkv.simulate.asked import Asked
from pushkv.simulate.calibration import FREE, Calibration, fit, fitted
from pushkv.simulate.plots import write_svg
from pushkv.simulate.published import points, sources
from pushkv.simulate.questions import QUESTIONS
from pushkv.simulate.run import Interrupted, simulate
from pushkv.simulate.settings import Deployment, Design, Settings, Traffic

from .conventions import App

__all__ = ["simulate_app"]

simulate_app: App = App(
    help="Simulate engines that hand KV over: pull, push early, push late, monolithic.\n\n"
    "Engines, links and routers are models, calibrated to published measurements; hand-overs are "
    "done by the machines that run in production, in virtual time. Begin with `pushkv simulate "
    "calibration`, which says what is assumed and how far it is off, then ask: `pushkv simulate "
    "early-or-late --plot answer.svg`. A case of your own: `pushkv simulate run push-early --rate "
    "4 --prompt 8192 --prefill 2 --decode 2`.",
    no_args_is_help=True,
)

SeedOption = Annotated[
    int, typer.Option(help="Of arrivals, lengths and the router's draws.", min=0)
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write settings and results there.", dir_okay=False)
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw the figure there, as SVG; needs matplotlib.", dir_okay=False),
]
RequestsOption = Annotated[int, typer.Option(help="Requests in each cell.", min=10)]


@simulate_app.command("calibration")
def calibration_command(json: JsonOption = None, plot: PlotOption = None) -> None:
    """Say what is given, what is fitted, and the error at every published point.

    Example: pushkv simulate calibration --json errors.json
    """
    values = fitted()
    with _bar() as telling:
        every, together = accuracy(values, telling)
    _show([*parameters(values), every, together], json, plot, every)
    for name, source in sources().items():
        typer.echo(f"{name}: {source.title}, {source.date}\n  {source.url}\n  {source.read}")


def _question(name: str) -> Callable[[int, int, Path | None, Path | None], None]:
    question = QUESTIONS[name]

    def command(
        seed: SeedOption = 0,
        requests: RequestsOption = 400,
        json: JsonOption = None,
        plot: PlotOption = None,
    ) -> None:
        with _bar() as telling:
            answer = question(Asked(fitted(), seed, requests, telling))
        _show([answer], json, plot, answer)

    command.__doc__ = (
        f"{(question.__doc__ or '').splitlines()[0]}\n\n"
        f"Example: pushkv simulate {name} --requests 200 --plot {name}.svg"
    )
    return command


for _name in QUESTIONS:
    simulate_app.command(_name)(_question(_name))


@simulate_app.command("run")
def run_command(
    design: Annotated[Design, typer.Argument(help="How KV comes to where it is decoded.")],
    rate: Annotated[float, typer.Option(help="Requests per second.", min=0.001)] = 1.0,
    requests: RequestsOption = 400,
    prompt: Annotated[int, typer.Option(help="Prompt tokens, on average.", min=1)] = 4096,
    output: Annotated[int, typer.Option(help="Output tokens, on average.", min=1)] = 128,
    spread: Annotated[
        float, typer.Option(help="Lengths are times e^-spread to e^spread.", min=0, max=3)
    ] = 0.0,
    reuse: Annotated[
        float, typer.Option(help="Share of a prompt cached at both engines.", min=0, max=1)
    ] = 0.0,
    prefill: Annotated[int, typer.Option(help="Prefill engines.", min=1)] = 1,
    decode: Annotated[int, typer.Option(help="Decode engines.", min=1)] = 1,
    machines: Annotated[
        bool, typer.Option(help="Push with the real machines, or with latencies alone.")
    ] = True,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Simulate one case with the calibrated models.

    Example: pushkv simulate run push-early --rate 4 --prompt 8192 --prefill 2 --decode 2
    """
    values = fitted()
    traffic = Traffic(
        rate, requests, prompt, output, spread, cached_prefill=reuse, cached_decode=reuse
    )
    settings = Settings(
        design,
        values.engine(),
        values.link(),
        Deployment(prefill, decode),
        traffic,
        seed=seed,
        machines=machines,
    )
    try:
        with _bar() as telling:
            result = simulate(settings, lambda ended: telling(0, 1, str(design), ended / requests))
    except Interrupted as stopped:
        result = stopped.result
    told = asdict(result)
    rows = [
        (name, "  ".join(f"{key} {part:.6g}" for key, part in value.items()))
        if isinstance(value, dict)
        else (name, f"{value:.6g}" if isinstance(value, float) else str(value))
        for name, value in told.items()
    ]
    answer = Answer(
        f"{design}",
        "Seconds of virtual time.",
        ("what", "value"),
        rows,
        None,
        [{"settings": asdict(settings), "result": told}],
        result.partial,
    )
    _show([answer], json, None, answer)


@simulate_app.command("fit")
def fit_command(
    to: Annotated[Path, typer.Argument(help="Write the values there.", dir_okay=False)],
    trials: Annotated[int, typer.Option(help="Values to try.", min=1)] = 400,
    seed: Annotated[int, typer.Option(help="Of the search.", min=0)] = 0,
    anew: Annotated[
        bool, typer.Option("--anew", help="Begin in the middle of all ranges.")
    ] = False,
) -> None:
    """Fit the free parameters to their half of the points, and write them as JSON.

    Example: pushkv simulate fit values.json --trials 200
    """
    with _bar() as telling:
        half = [point for point in points() if point.fit]

        def progress(trial: int, least: float) -> None:
            telling(0, 1, f"typical error {least:.3f}", trial / trials)

        found, _ = fit(half, seed, trials, begin=None if anew else fitted(), progress=progress)
        write_values(found, to)


def write_values(found: Calibration, to: Path) -> None:
    """Write values, rounded to what they are good for."""
    rounded = {each.name: float(f"{found.values[each.name]:.4g}") for each in FREE}
    to.write_text(dumps(rounded, indent=1) + "\n")


@contextmanager
def _bar() -> Iterator[Telling]:
    """A bar where somebody watches, nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("begins", total=1.0)

        def telling(cell: int, cells: int, what: str, share: float) -> None:
            bar.update(task, description=what, completed=(cell + share) / cells)

        yield telling


def _show(answers: list[Answer], json: Path | None, plot: Path | None, main: Answer) -> None:
    console = Console(highlight=False)
    for answer in answers:
        table = Table(*answer.columns, title=answer.title, title_justify="left")
        for row in answer.rows:
            table.add_row(*row)
        console.print(table)
        if answer.about:
            console.print(answer.about, style="dim")
        console.print()
    if json is not None:
        told = {"partial": main.partial, "answers": [_told(each) for each in answers]}
        json.write_text(dumps(told, indent=1, default=str) + "\n")
    if plot is not None and main.figure is not None:
        write_svg(main.figure, plot)
    if main.partial:
        typer.echo("PARTIAL: interrupted; what is not above was not run.", err=True)
        raise typer.Exit(130)


def _told(answer: Answer) -> dict[str, object]:
    return {
        "title": answer.title,
        "about": answer.about,
        "columns": answer.columns,
        "rows": answer.rows,
        "results": answer.results,
    }

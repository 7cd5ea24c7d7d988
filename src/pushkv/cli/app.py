"""The commands."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pushkv.core.errors import ConfigurationError
from pushkv.demo.report import DemoReport

from .admin import admin_app
from .bench import bench_command
from .check import check_command
from .conventions import App
from .doctor import doctor_command
from .simulate import simulate_app
from .swarm import swarm_command
from .top import top_command
from .trace import trace_app

__all__ = ["app"]

app: App = App(
    help="Push-based KV cache transfer between prefill and decode engines.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.add_typer(admin_app, name="admin")
app.add_typer(trace_app, name="trace")
app.add_typer(simulate_app, name="simulate")
app.command("bench")(bench_command)
app.command("check")(check_command)
app.command("swarm")(swarm_command)
app.command("doctor")(doctor_command)
app.command("top")(top_command)


class EngineKind(StrEnum):
    """Which engines the demo runs."""

    VLLM = "vllm"
    REFERENCE = "reference"


class DispatchKind(StrEnum):
    """In which order a request's two legs go out."""

    CONCURRENT = "concurrent"
    SEQUENTIAL = "sequential"


@app.callback()
def root() -> None:
    """Push-based KV cache transfer between prefill and decode engines."""


@app.command()
def demo(
    engine: Annotated[
        EngineKind,
        typer.Option(help="vllm: real engines, a minute or two. reference: small ones, seconds."),
    ] = EngineKind.VLLM,
    dispatch: Annotated[
        DispatchKind,
        typer.Option(
            help="concurrent: decode registers its blocks while prefill computes. "
            "sequential: prefill first, as routers for pull connectors do."
        ),
    ] = DispatchKind.CONCURRENT,
    transport: Annotated[
        str, typer.Option(help="Of the reference engines: the name of an installed transport.")
    ] = "nixl",
    json: Annotated[
        Path | None, typer.Option(help="Write the results and timelines there.", dir_okay=False)
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option(help="Keep the engines' logs and traces there.", file_okay=False),
    ] = None,
) -> None:
    """Run one prefill and one decode engine, push KV between them, compare every token.

    The tokens must be those of a single engine, no prompt may be computed by the decode engine, the
    bytes written must be those of the prompts' blocks, and one flipped byte of KV must change
    tokens, or equal tokens would prove nothing. Exit code 0 only if all of that holds.

    Example: pushkv demo --engine reference --json found.json
    """
    console = Console()
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with progress:
        report = _run(engine, dispatch, transport, logs, progress)
    report.show(console)
    if json is not None:
        report.write_json(json)
    if report.problems:
        raise typer.Exit(1)


def _run(
    engine: EngineKind,
    dispatch: DispatchKind,
    transport: str,
    logs: Path | None,
    progress: Progress,
) -> DemoReport:
    if engine is EngineKind.REFERENCE:
        from pushkv.demo.reference import run_reference_demo

        return run_reference_demo(dispatch, progress, transport)
    if transport != "nixl":
        raise ConfigurationError("transport", transport, "nixl, or --engine reference with it")
    from pushkv.demo.vllm import run_vllm_demo

    return run_vllm_demo(dispatch, logs, progress)

"""`pushkv top`: links and transfers of running engines, as they are now."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from pushkv.core.errors import PushKVError

from .engine_tables import Seen, overview
from .engines import (
    AuthorityOption,
    CertificateOption,
    Engine,
    KeyOption,
    SecretOption,
    TargetsArgument,
    engine_at,
)

__all__ = ["look", "top_command", "write_states"]

ROWS_BESIDE = 8
"""Lines of the terminal that no list has."""


def top_command(
    targets: TargetsArgument,
    every_s: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.1, max=3600.0)
    ] = 1.0,
    rows: Annotated[
        int, typer.Option(help="Most lines of each table; 0 for what fits.", min=0, max=10_000)
    ] = 0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end.")] = False,
    json: Annotated[
        Path | None,
        typer.Option(help="Write what was seen last there, by target.", dir_okay=False),
    ] = None,
    secret: SecretOption = None,
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Watch links, transfers and quarantined blocks of running engines; the oldest come first.

    Each engine needs an admin endpoint (admin_socket or admin_port). One that is gone is shown as
    gone, and comes back when it does. Ctrl-C ends.

    Example: pushkv top /run/pushkv/prefill.sock /run/pushkv/decode.sock

    Exit code 1 with --once if some engine is gone, 130 after Ctrl-C.
    """
    console = Console()
    seen: list[Seen] = []
    try:
        engines = [engine_at(each, secret, authority, certificate, key) for each in targets]
        if once:
            seen = look(engines, rows or 1_000)
            console.print(overview(seen, rows or 1_000), highlight=False)
        else:
            _watch(engines, console, rows, every_s, seen)
    finally:
        if json is not None and seen:
            write_states(json, seen)
    if any(each.state is None for each in seen):
        raise typer.Exit(1)


def look(engines: list[Engine], most: int) -> list[Seen]:
    """What each engine tells; all are asked at once."""
    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(lambda each: _look(each, most), engines))


def _look(engine: Engine, most: int) -> Seen:
    try:
        return Seen(engine.target, engine.state(most))
    except PushKVError as error:
        return Seen(engine.target, None, str(error).removeprefix(f"{engine.target}: "))


def _watch(
    engines: list[Engine], console: Console, rows: int, every_s: float, seen: list[Seen]
) -> None:
    """Until Ctrl-C; `seen` is what was seen last."""
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            most = rows or max(3, (console.height - ROWS_BESIDE - len(engines)) // 3)
            seen[:] = look(engines, most)
            live.update(overview(seen, most), refresh=True)
            time.sleep(every_s)


def write_states(path: Path, seen: list[Seen]) -> None:
    """What was seen, as JSON by target."""
    found = {each.target: each.state or {"gone": each.error} for each in seen}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
